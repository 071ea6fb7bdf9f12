"""What lrl's command line reads in another way than jsonargparse."""

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from jsonargparse import Namespace, _typehints
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.cli import LightningArgumentParser

from lrl.callbacks import Evaluation
from lrl.system.imports import ROOMS

log = logging.getLogger(__name__)

DEFAULT_STRATEGY = "lrl.AsyncSingleDevice"
NULLS = ("null", "Null", "NULL", "~")
"""YAML's words for nothing."""
ABSOLUTE = re.compile(r"\$\{([a-zA-Z][\w.\[\]]*)\}")

_parse: Any = _typehints.parse_value_or_config
_parse_leaf: Any = _typehints.basic_json_or_yaml_load
_path_of_class: Any = _typehints.resolve_class_path_by_name
_drop_settings: Any = _typehints.discard_init_args_on_class_path_change


def install() -> None:
    """Replaces jsonargparse's reading of values, bare class names and changed classes in this
    process. By itself it only knows the classes that are imported."""
    patched: Any = _typehints
    patched.parse_value_or_config = _value_at_its_setting
    patched.basic_json_or_yaml_load = _value_of_leaf
    patched.resolve_class_path_by_name = _path_of_shipped_class
    patched.discard_init_args_on_class_path_change = _drop_settings_aloud


def _value_at_its_setting(value: Any, *args: Any, **how: Any) -> tuple[Any, Any]:
    """Reads a value once, where the type of its setting is known.

    jsonargparse reads it as YAML at every class on the way, and passes Python's text of what it has
    read on: `--data.prompts.system_prompt null` became the word "None".
    """
    if isinstance(value, _typehints.NestedArg):
        is_last = "." not in value.key  # no further class is on the way
        return (value._replace(val=None) if is_last and value.val in NULLS else value), None
    return (value, None) if _begins_as_comment(value) else _parse(value, *args, **how)


def _value_of_leaf(value: str) -> Any:
    return value if _begins_as_comment(value) else _parse_leaf(value)


def _begins_as_comment(value: Any) -> bool:
    """YAML takes such a text for a comment: the template "# {question}" was silently left out."""
    return isinstance(value, str) and value.lstrip().startswith("#")


def _path_of_shipped_class(kind: Any, name: str) -> str:
    """Imports the class of a bare name, for `--model.objective TBA`."""
    for room in map(import_module, ROOMS):
        if name in room.__all__:
            getattr(room, name)
    path: str = _path_of_class(kind, name)
    return path


def _drop_settings_aloud(parser: Any, previous: Any, value: Any) -> None:
    """Warns of the settings that jsonargparse drops without a word when a setting's class changes:
    those that the new class does not take."""
    if not isinstance(previous, Namespace) or "init_args" not in previous:
        return
    old, new, settings = previous.class_path, value["class_path"], previous.init_args
    if old == DEFAULT_STRATEGY != new:  # jsonargparse writes out its defaults, which nobody has set
        unset = _typehints.ActionTypeHint.get_class_parser(old, {}).get_defaults()
        for name, one in vars(unset).items():
            if name in settings and settings[name] == one:
                settings.pop(name)
    given = list(vars(settings))
    _drop_settings(parser, previous, value)
    dropped = [name for name in given if name not in settings]
    # jsonargparse drops them once more in copies, where it gives the setting, not the class.
    if dropped and not isinstance(parser, _typehints.ActionTypeHint):
        text = "%s does not take what was set for %s, so this is left out: %s."
        rank_zero_only(log.warning)(text, new, old, ", ".join(dropped))


def from_the_root(words: Iterable[str], verb: str) -> list[str]:
    """Returns the words with every `${...}` from the root of the parsed config: jsonargparse would
    look for it within the class whose setting it is. It leaves a path with spaces as it is."""
    return [ABSOLUTE.sub(rf"${{ {verb}.\1 }}", word) for word in words]


class Parser(LightningArgumentParser):
    """Parser whose errors are one line, and which widens short forms.

    `prompts: problems.jsonl` is short for `lrl.Prompts` with the setting `source`, and a reward's
    name for `lrl.rewards.Function`. jsonargparse does not know that: over a short form,
    `--data.prompts.limit 2` became a data set of one row with the column `limit`.
    """

    owner: type = object
    """The class whose settings it parses; of several, the last one."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exits with a short error."""
        if not self.exit_on_error:  # a nested parser: the outer one needs its message
            super().error(message, ex)
        from lrl.cli.settings import explain  # only an error needs it

        self.exit(2, f"lrl: error: {explain(message)}\n")

    def add_class_arguments(self, *args: Any, **settings: Any) -> list[str]:
        """Adds the settings of a class; none of them is read from a file whose name is its value.

        jsonargparse would take the content of `problems.csv` for the name of a data set.
        """
        self.owner = args[0]
        return super().add_class_arguments(*args, **settings | {"sub_configs": False})

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None, **settings: Any
    ) -> Namespace:
        """Parses command-line words; for a nested class a single one, over earlier settings."""
        if args and namespace:
            names = (word.lstrip("-").partition("=")[0] for word in args)
            changed = [name.partition(".")[0] for name in names if "." in name]
            namespace = widen(namespace, self.owner, changed)
        return super().parse_args(args, namespace, **settings)

    def parse_object(self, obj: Any, namespace: Any = None, **settings: Any) -> Namespace:
        """Parses the settings of a config, over the settings of earlier configs."""
        if namespace:
            values = vars(obj) if isinstance(obj, Namespace) else obj
            parts = {name: one for name, one in values.items() if _has_settings(one)}
            changed = [name for name, part in parts.items() if "class_path" not in part]
            namespace = widen(namespace, self.owner, changed)
        return super().parse_object(obj, namespace, **settings)

    def validate(self, namespace: Namespace, *args: Any, **settings: Any) -> None:
        """Checks nulls too, which jsonargparse takes for settings that were left out."""
        try:
            super().validate(namespace, *args, **settings | {"skip_unset": False})
        except TypeError:
            super().validate(namespace, *args, **settings)  # says what was left out
            raise


def widen(settings: Namespace, owner: type, changed: Collection[str]) -> Namespace:
    """Returns the settings of the class `owner`, with short forms as classes where `changed` says
    that one of their own settings is given now."""
    widened = settings.clone() if {"prompts", "rewards"} & set(changed) else settings
    source = widened.get("prompts")
    if "prompts" in changed and source and not _has_settings(source):
        # What `Prompts.coerce` makes of a source; an evaluation's is the test split.
        split = {"split": "test"} if issubclass(owner, Evaluation) else {}
        widened.prompts = _class("lrl.Prompts", source=source, **split)
    rewards = widened.get("rewards")
    last = rewards[-1] if rewards and isinstance(rewards, list) else rewards
    if "rewards" in changed and last and not _has_settings(last):
        function = _class("lrl.rewards.Function", function=last)
        widened.rewards = [*rewards[:-1], function] if isinstance(rewards, list) else function
    return widened


def _has_settings(value: Any) -> bool:
    return isinstance(value, dict | Namespace)


def _class(path: str, **settings: Any) -> Namespace:
    return Namespace(class_path=path, init_args=Namespace(**settings))
