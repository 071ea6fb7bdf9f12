"""What jsonargparse says of a wrong setting, in lrl's words: which setting, what is wrong with it, what was meant.

jsonargparse lays one message into another, indented: one for each class on the way to the setting, and one for each
type that the setting may have. The first of `REASONS` that is found in there is told, with the setting's whole name. A
message without any of them is passed on, without the lines that every optional setting repeats.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lrl.cli import fit_help
from lrl.runtime import import_by_name

NOISE = ("Does not validate against any", "Subtypes:", "Expected a <class 'NoneType'>", "Given value", "Errors:")
"""Lines that only repeat how optional settings are typed."""
LRL, CALLBACKS, LOGGERS = ("lrl",), "lightning.pytorch.callbacks", "lightning.pytorch.loggers"
ROOMS: dict[str, tuple[str, ...]] = {
    "model": LRL,
    "data": LRL,
    "strategy": LRL,
    "objective": ("lrl.objectives",),
    "advantages": ("lrl.advantages",),
    "rewards": ("lrl.rewards",),
    "dispatch": ("lrl.routing.dispatch",),
    "callbacks": ("lrl.callbacks", CALLBACKS),
    "logger": (LOGGERS,),
}
"""Where the classes are that a setting may name."""
TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"} | dict.fromkeys(
    ("list", "tuple"), "a list, as in [1, 2]"
)


class Found(NamedTuple):
    """A reason, and where in the message it stands."""

    match: re.Match[str]
    setting: str
    """The whole name of the setting; empty if the message is about none."""
    owner: str
    """The innermost class around it, by its path; empty if there is none."""
    message: str

    @property
    def value(self) -> str:
        """What the setting was given, as far as the message has it."""
        values = re.findall(r"(?:Got|Given) value: (?:NestedArg\(.*val='(.*)'\)|(.*))", self.message)
        return next((part for part in values[-1] if part), "") if values else ""


def explained(message: str) -> str:
    """The message of a parser as the text of one error."""
    lines = message.splitlines()
    for pattern, tell in REASONS:
        for number, line in enumerate(lines):
            if match := re.search(pattern, line):
                keys, classes = _way_to(lines, number)
                if told := tell(Found(match, ".".join(keys), classes[-1] if classes else "", message)):
                    return told
    return without_noise(message)


def without_noise(message: str) -> str:
    """A parser's message without the lines that every optional setting adds to it."""
    lines = [line for line in message.splitlines() if line.strip() and not line.strip(" -").startswith(NOISE)]
    return "\n".join(lines)


def of_interpolation(error: Exception) -> str:
    """What OmegaConf says of a `${...}` that leads nowhere."""
    wanted = re.search(r"(?:resolved to|Interpolation key) '(?:fit\.|validate\.)?(\w[^']+)'", str(error))
    key = re.search(r"full_key: (?:fit\.|validate\.)?(\S+)", str(error))
    if wanted is None or key is None:
        return str(error)
    return f"{key[1]}: ${{{wanted[1]}}} leads to no setting. Write the whole path, as --print_config shows it."


def of_rows(words: Iterable[str]) -> str:
    """Of the words of a command that were taken for a row of prompts: the first that is no setting of `lrl.Prompts`."""
    known = [f"--data.prompts.{name}" for name in settings_of("lrl.Prompts")]
    asked = (word.partition("=")[0].replace(".init_args.", ".") for word in words)
    for word in asked:
        if word.startswith("--data.prompts.") and word not in known:
            return f"{word}: there is no such setting.{_nearest(word, known)}"
    return ""


def settings_of(class_path: str) -> set[str]:
    """The settings of a class: what its constructor and those of its bases take."""
    module, _, name = class_path.rpartition(".")
    bases = inspect.getmro(getattr(import_module(module), name))
    taken = (inspect.signature(base.__init__).parameters for base in bases if "__init__" in vars(base))  # type: ignore[misc]
    return {name for parameters in taken for name in parameters} - {"self", "args", "kwargs"}


def _way_to(lines: list[str], number: int) -> tuple[list[str], list[str]]:
    """The keys and the classes of the messages in which line `number` lies, outermost first."""
    keys: list[str] = []
    classes: list[str] = []
    indent = len(lines[number])
    for line in filter(str.strip, reversed(lines[: number + 1])):
        if (own := len(line) - len(line.lstrip())) < indent:
            indent = own
            keys += re.findall(r'Parser key "([^"]+)"', line)
            classes += re.findall(r"Problem with given class_path '([^']+)'", line)
    return keys[::-1], classes[::-1]


def _no_setting(found: Found) -> str:
    name = f"{found.setting}.{found.match[1]}".lstrip(".")
    known = [f"{found.setting}.{one}".lstrip(".") for one in settings_of(found.owner)]
    return f"{name}: {found.owner} has no such setting.{_nearest(name, known)}"


def _no_option(found: Found) -> str:
    dashes, name = found.match[1], found.match[2].replace(".init_args.", ".")
    known = [f"{dashes}{one}" for one in fit_help.all_settings()]
    return f"{dashes}{name}: there is no such setting.{_nearest(dashes + name, known)}"


def _nearest(name: str, known: list[str]) -> str:
    """A question with the setting that may have been meant: of the same last word, or spelt nearly so."""
    last = name.strip("-").rpartition(".")[2]
    same = [setting for setting in known if setting.strip("-").rpartition(".")[2] == last]
    return f" Did you mean {same[0]}?" if len(same) == 1 else import_by_name.did_you_mean(name, known)


def _stray_word(found: Found) -> str:
    word = found.match[1]
    return f"{word!r} belongs to no setting. A recipe stands behind --config: did you mean --config {word}?"


def _no_value(found: Found) -> str:
    """argparse names the outermost setting alone; the command has the whole one."""
    option, words = found.match[1].rpartition("/")[2], [*sys.argv[1:], "--"]
    pairs = zip(words, words[1:], strict=False)
    bare = (word for word, after in pairs if word.startswith(option) and "=" not in word and after.startswith("--"))
    return f"{next(bare, option)}: no value stands behind it."


def _no_class(found: Found) -> str:
    rooms = ROOMS.get(found.setting.rpartition(".")[2], LRL)
    classes = [name for room in rooms for name in import_by_name.public_names(import_module(room)) if name[0].isupper()]
    near = import_by_name.did_you_mean(found.match[1], classes)
    return f"{found.setting}: there is no class {found.match[1]!r}.{near or ' Write module.Class.'}"


def _not_importable(found: Found) -> str:
    """Why a class cannot be imported; empty if it can."""
    try:
        import_by_name.function(found.match[1])
    except ValueError as error:
        return f"{found.setting}: {error}"
    return ""


def _abstract(found: Found) -> str:
    return f"{found.setting}: say which class, by `class_path`; {found.match[1]} is what they have in common."


def _no_class_path(found: Found) -> str:
    return f"{found.setting} must be a {found.match[1]}: the name of a class, or `class_path` and `init_args`."


def _not_one_of(found: Found) -> str:
    choices = [choice.strip(" '\"") for choice in found.match[1].split(",")]
    near = import_by_name.did_you_mean(found.value, choices)
    return f"{found.setting} is {found.value!r}; it must be one of {', '.join(choices)}.{near}"


def _wrong_type(found: Found) -> str:
    types = dict.fromkeys(re.findall(r"Expected a <class '(\w+)'>", found.message))
    return f"{found.setting} is {found.value!r}; it must be {' or '.join(TYPES[one] for one in types if one in TYPES)}."


def _missing(found: Found) -> str:
    names = re.sub(r"\b(fit|validate)\.", "", found.match[1]).split(", ")
    return f"{' and '.join(sorted(names))} must be given: by a recipe (--config quickstart), or one by one."


def _no_yaml(found: Found) -> str:
    """jsonargparse does not say in which file."""
    for name in (word.removeprefix("--config=") for word in sys.argv if Path(word.removeprefix("--config=")).is_file()):
        try:
            with open(name, encoding="utf-8") as file:
                yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            return f"--config {name} is no YAML: {' '.join(str(error).split())}"
    return ""


REASONS: tuple[tuple[str, Callable[[Found], Any]], ...] = (
    (r"Problems parsing config|Unable to load config", _no_yaml),
    (r"Option '([^']+)' is not accepted", _no_setting),
    (r"does not accept option '()([^']+)'", _no_option),
    (r"unrecognized arguments: (--?)([^\s=+]+)", _no_option),
    (r"unrecognized arguments: (\S+)", _stray_word),
    (r"argument (\S+): expected one argument", _no_value),
    (r"the following arguments are required: (.+)", _missing),
    (r"Expected a typing\.Literal\[(.*?)\]", _not_one_of),
    (r"Problem with given class_path '([^']+)'", _not_importable),
    (r"Expected a path but ([\w.]+\.\w+) either not accessible", _not_importable),
    (r"Expected a dot import path string: (.+)", _no_class),
    (r"Expected an instantiatable class, but (\S+) is abstract", _abstract),
    (r"Not a valid subclass of (\w+)", _no_class_path),
    (r"Given value: .*class_path'?[=:] ?'([\w.]+)'", _not_importable),
    (rf"Expected a <class '({'|'.join(TYPES)})'>", _wrong_type),
)
"""What can be wrong, from the most certain reason to the least: a setting of several types has a reason for each."""
