"""What a user can set: the help of `lrl fit` and `lrl validate`, a line a setting; and jsonargparse's
errors in one line: the setting, its fault, and the nearest name.

Names, types, defaults and sentences are those of the constructors and their docstrings. jsonargparse
nests a message by indentation: a level for each class on the way to the setting, and a line for each
type that the setting may have. The deepest line says the fault; the levels around it make the
setting's whole name.
"""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import lightning as L
from jsonargparse import ArgumentParser
from jsonargparse._typehints import ActionTypeHint, type_to_str

import lrl
from lrl import aliases, callbacks
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system import imports

GROUPS: dict[str, type] = {
    "model": lrl.PolicyModule,
    "data": lrl.RolloutDataModule,
    "data.prompts": lrl.Prompts,
    "trainer.strategy": GeneratorDevices,
    "trainer.strategy.server": lrl.ServerSettings,
    "trainer": lrl.Trainer,
}
TRAINER_SETTINGS = (
    *("accelerator", "devices", "max_steps", "max_epochs", "precision", "logger", "callbacks"),
    *("usual_callbacks", "default_root_dir", "log_every_n_steps", "enable_progress_bar"),
)
"""Those of Lightning's Trainer in the help."""
RUN = {
    "config": "A YAML file, or the name of a shipped recipe; several are merged in order.",
    "ckpt_path": "Checkpoint to resume from.",
    "seed_everything": "Seed of the run (default 0).",
    "print_config": "Print what the run would use, and exit.",
}
HEAD = """usage: lrl {verb} [--config RECIPE] [--SETTING VALUE ...]

Recipes: {recipes}. The command line wins over the recipe.
"""
FURTHER = """Further
  lrl {verb} --model.objective.help GSPO           settings of a class, for any setting that names one
  lrl {verb} --trainer.callbacks.help lrl.callbacks.Evaluation
  lrl {verb} --help all                            everything that Lightning's Trainer takes
  lrl {verb} --config quickstart --print_config    what a run would use
"""
WIDTH = 160
WIDEST_TYPE = 60

NOISE = (
    *("Does not validate", "Subtypes:", "Errors:", "Given value", "Expected a <class 'NoneType'>"),
    *("Problem with given class_path", "Subclass types expect", "a class path", "a dict with"),
)
"""Lines that every setting of several types has, or of a class."""
EVERY_CALLBACK = "lightning.Callback"
"""jsonargparse also tries each setting of the last callback on this class, which has none."""
UNKNOWN = re.compile(r"unrecognized arguments: (-*[^\s=+]+)|[Oo]ption '([^']+)'")
NO_CLASS = re.compile(
    r"Expected a dot import path string: (.+)"
    r"|Problem with given class_path '([^']+)'"
    r"|Expected a path but ([\w.]+) either not accessible"
    r"|Unexpected import path format: (.+)"
)
CLASSES = (
    *(*imports.ROOMS, "lrl.advantages", "lrl.environments", "lrl.routing.dispatch"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers"),
)
"""Where the classes are that a setting may name."""


class Setting(NamedTuple):
    """A line of the help."""

    name: str
    kind: str
    """Its type, and its default after an equals sign."""
    text: str


def help_of(verb: str, recipes: Sequence[str]) -> str:
    """Returns the help of `verb`."""
    lines = [HEAD.format(verb=verb, recipes=", ".join(recipes))]
    lines += ["Run", *_table([Setting(f"--{name}", "", text) for name, text in RUN.items()]), ""]
    for group, kind in GROUPS.items():
        shown = [
            one._replace(name=f"--{group}.{one.name}")
            for one in settings_of(kind)
            if group != "trainer" or one.name in TRAINER_SETTINGS
        ]
        lines += [f"{group}: {kind.__name__}", *_table(shown), ""]
    kinds = {name: getattr(callbacks, name) for name in callbacks.__all__ if name != "OnRankZero"}
    rows = [
        Setting(name, "", (kind.__doc__ or "").partition("\n\n")[0])
        for name, kind in kinds.items()
        if issubclass(kind, L.Callback)
    ]
    lines += ["callbacks, added by --trainer.callbacks+ NAME --trainer.callbacks.SETTING VALUE"]
    return "\n".join([*lines, *_table(rows), "", FURTHER.format(verb=verb)])


def all_settings() -> list[str]:
    """Returns the names of all settings of the shipped classes and of Lightning's Trainer."""
    return [*RUN, *(f"{at}.{one.name}" for at, kind in GROUPS.items() for one in settings_of(kind))]


def settings_of(kind: Any) -> list[Setting]:
    """Returns the settings of a class and its bases."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, fail_untyped=False)
    found = []
    for action in parser._actions:
        if not isinstance(action, ActionTypeHint) or "." in action.dest:
            continue  # its help, or a setting of a setting
        shown = type_to_str(action._typehint)
        if not getattr(action, "_required", action.required):
            shown += f" = {action.default}"
        if len(shown) > WIDEST_TYPE:
            shown = f"{shown[: WIDEST_TYPE - 4]} ..."
        found.append(Setting(action.dest, shown, action.help or ""))
    return found


def _table(settings: list[Setting]) -> list[str]:
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    names, kinds = (max(len(one[column]) for one in settings) for column in (0, 1))
    lines = []
    for name, kind, sentence in settings:
        head = f"  {name:{names}}  " + (f"{kind:{kinds}}  " if kinds else "")
        first = " ".join(sentence.split()).partition(". ")[0]
        lines.append(head + textwrap.shorten(first, max(20, width - len(head)), placeholder=" ..."))
    return [line.rstrip() for line in lines]


class Line(NamedTuple):
    """A line of jsonargparse's message."""

    text: str
    setting: str
    """Whole name of the setting that it is about."""
    owner: str
    """Path of the innermost class around it."""
    depth: int


def explain(message: str) -> str:
    """Returns the text of one error for a parser's message."""
    lines = sorted(_lines(message), key=lambda line: -line.depth)
    for line in lines:
        if unknown := UNKNOWN.search(line.text):
            return _no_setting(unknown[1] or unknown[2], line)
    for line in lines:
        if (match := NO_CLASS.search(line.text)) and (text := _no_class(match, line.setting)):
            return text
    faults = [line for line in lines if line.setting and not line.text.startswith(NOISE)]
    if not faults:
        return without_noise(message)
    setting = max(faults, key=lambda line: line.setting.count(".")).setting
    texts = dict.fromkeys(line.text for line in faults if line.setting == setting)
    certain = [text for text in texts if not text.startswith("Not a valid subclass")]
    return f"{setting}: {'; or '.join(certain or texts)}"


def without_noise(message: str) -> str:
    """Returns a constructor's error without the other types that its setting might have."""
    lines = [line.strip(" -") for line in message.splitlines()]
    own = [line for line in lines if not line.startswith((*NOISE, "Expected a <class"))]
    return " ".join(dict.fromkeys(own or lines))


def _lines(message: str) -> list[Line]:
    """Returns the lines that say something, each with the names around it."""
    around: list[Line] = []
    found = []
    for line in filter(str.strip, message.splitlines()):
        depth = len(line) - len(line.lstrip())
        around = [one for one in around if one.depth < depth]
        setting, owner = (around[-1].setting, around[-1].owner) if around else ("", "")
        if key := re.search(r'[Pp]arser key "([^"]+)"', line):
            setting = f"{setting}.{key[1]}".lstrip(".")
        text = re.sub(r'^[Pp]arser key "[^"]+":\s*', "", line.strip(" -"))
        if text and owner != EVERY_CALLBACK:
            found.append(Line(text, setting, owner, depth))
        if kind := re.search(r"Problem with given class_path '([^']+)'", line):
            owner = kind[1]
        around.append(Line("", setting, owner, depth))
    return found


def _no_setting(word: str, line: Line) -> str:
    name = word.replace(".init_args.", ".")
    whole = f"{line.setting}.{name}".lstrip(".")
    own: list[str] = []
    if line.owner:
        kind = imports.function(line.owner)
        own = [f"{line.setting}.{one.name}" for one in settings_of(kind)]
    return f"{whole}: there is no such setting.{_instead(name, own)}"


def _instead(name: str, known: Iterable[str]) -> str:
    """Returns what a wrong name should be; empty if nothing is near."""
    last = name.rpartition(".")[2].strip("-").replace("-", "_").lower()
    if answer := aliases.setting(last):
        return f" {answer}"
    here: dict[str, list[str]] = {}
    for one in dict.fromkeys([*known, *all_settings()]):
        here.setdefault(one.rpartition(".")[2], []).append(one)
    near = imports.nearest(last, here)
    return f" Did you mean {' or '.join(here[near])}?" if near else ""


def _no_class(match: re.Match[str], setting: str) -> str:
    """Returns the error about the name of a class; empty if there is such a class."""
    name = next(filter(None, match.groups()))
    letters = name.rpartition(".")[2].replace("_", "").replace("-", "").upper()
    if objective := aliases.OBJECTIVES.get(letters):
        return f"{setting}: there is no class {name!r}. In lrl it is {objective}."
    if "." in name:
        try:
            imports.function(name)
        except ValueError as error:
            return f"{setting}: {error}"
        return ""
    public = [one for room in CLASSES for one in imports.public_names(import_module(room))]
    near = imports.did_you_mean(name, [one for one in public if one[0].isupper()])
    return f"{setting}: there is no class {name!r}.{near or ' Write module.Class.'}"
