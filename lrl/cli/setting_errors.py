"""jsonargparse's errors in short: the setting, its fault, and the nearest valid name.

jsonargparse nests messages by indentation: one for each class on the way to the setting, and one for each type that the
setting may have. The first of `REASONS` that matches one of its lines becomes the error, with the setting's whole name.
A message without a match is shown without the lines that every optional setting repeats.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import yaml

from lrl.cli import fit_help, misread
from lrl.runtime import import_by_name

NOISE = ("Does not validate against any", "Subtypes:", "Expected a <class 'NoneType'>", "Given value", "Errors:")
"""Beginnings of lines that only repeat the types of optional settings."""
OTHER_TYPES = (
    *("Expected a <class", "Not a valid subclass of", "Subclass types expect", "Type collections.abc.Callable"),
    *("a class path (str)", "a dict with"),
)
"""Beginnings of lines about the types that a setting might have instead, behind the error of a class that it names."""
LRL = ("lrl",)
ROOMS: dict[str, tuple[str, ...]] = {
    "objective": ("lrl.objectives",),
    "advantages": ("lrl.advantages",),
    "rewards": ("lrl.rewards",),
    "dispatch": ("lrl.routing.dispatch",),
    "callbacks": ("lrl.callbacks", "lightning.pytorch.callbacks"),
    "logger": ("lightning.pytorch.loggers",),
}
"""Modules of the classes that a setting may name; `LRL` for all others."""
TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"} | dict.fromkeys(
    ("list", "tuple"), "a list, as in [1, 2]"
)


class Found(NamedTuple):
    """A matched line of the message, and the setting it is about."""

    match: re.Match[str]
    setting: str
    """The whole name of the setting; empty if the message is about none."""
    owner: str
    """Path of the innermost class around it; empty if there is none."""
    message: str

    @property
    def value(self) -> str:
        """The setting's value, as far as the message has it."""
        values = re.findall(r"(?:Got|Given) value: (?:NestedArg\(.*val='(.*)'\)|(.*))", self.message)
        return next((part for part in values[-1] if part), "") if values else ""


def explain(message: str) -> str:
    """Returns the text of one error for a parser's message."""
    lines = message.splitlines()
    for pattern, reason in REASONS:
        for number, line in enumerate(lines):
            if match := re.search(pattern, line):
                keys, classes = _path_to(lines, number)
                found = Found(match, ".".join(keys), classes[-1] if classes else "", message)
                text = reason.format(found=found) if isinstance(reason, str) else reason(found)
                if text:
                    return text
    return without_noise(message)


def without_noise(message: str) -> str:
    """Returns a parser's message without the lines that every optional setting adds."""
    return "\n".join(line for line in message.splitlines() if line.strip() and not line.strip(" -").startswith(NOISE))


def explain_constructor(message: str) -> str:
    """Returns the text for a constructor's error; jsonargparse puts it among the types that the setting might have."""
    if NOISE[0] not in message:
        return message
    said = [line.strip(" -") for line in without_noise(message).splitlines()]
    own = [line for line in dict.fromkeys(said) if not line.startswith(OTHER_TYPES)]
    return "\n".join(own or said)


def explain_interpolation(error: Exception) -> str:
    """Returns the text for OmegaConf's error about a `${...}` without a target."""
    wanted = re.search(r"(?:resolved to|Interpolation key) '(?:fit\.|validate\.)?(\w[^']+)'", str(error))
    key = re.search(r"full_key: (?:fit\.|validate\.)?(\S+)", str(error))
    if wanted is None or key is None:
        return str(error)
    return f"{key[1]}: ${{{wanted[1]}}} leads to no setting. Write the whole path, as --print_config shows it."


def explain_prompt_row(words: Iterable[str]) -> str:
    """Returns the error for the first word that is no setting of `lrl.Prompts`; it was taken for a row of prompts."""
    known = [f"--data.prompts.{name}" for name in settings_of("lrl.Prompts")]
    for word in (word.partition("=")[0].replace(".init_args.", ".") for word in words):
        if word.startswith("--data.prompts.") and word not in known:
            return f"{word}: there is no such setting.{_nearest(word, known)}"
    return ""


def settings_of(class_path: str) -> set[str]:
    """Returns the settings of a class: the arguments of its constructor and its bases' constructors."""
    module, _, name = class_path.rpartition(".")
    bases = inspect.getmro(getattr(import_module(module), name))
    taken = (inspect.signature(base.__init__).parameters for base in bases if "__init__" in vars(base))  # type: ignore[misc]
    return {name for parameters in taken for name in parameters} - {"self", "args", "kwargs"}


def _path_to(lines: list[str], number: int) -> tuple[list[str], list[str]]:
    """Returns the keys and the classes of the messages around line `number`, outermost first."""
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
    """Returns a question that names the known setting of the same last word, or of nearly the same spelling."""
    last = name.strip("-").rpartition(".")[2]
    same = [setting for setting in known if setting.strip("-").rpartition(".")[2] == last]
    return f" Did you mean {same[0]}?" if len(same) == 1 else import_by_name.did_you_mean(name, known)


def _no_value(found: Found) -> str:
    # argparse names only the outermost setting; the command has the whole name
    option, words = found.match[1].rpartition("/")[2], [*sys.argv[1:], "--"]
    pairs = zip(words, words[1:], strict=False)
    bare = (word for word, after in pairs if word.startswith(option) and "=" not in word and after.startswith("--"))
    return f"{next(bare, option)}: no value follows it."


def _no_class(found: Found) -> str:
    rooms = ROOMS.get(found.setting.rpartition(".")[2], LRL)
    classes = [name for room in rooms for name in import_by_name.public_names(import_module(room)) if name[0].isupper()]
    near = import_by_name.did_you_mean(found.match[1], classes)
    return f"{found.setting}: there is no class {found.match[1]!r}.{near or ' Write module.Class.'}"


def _not_importable(found: Found) -> str:
    """Returns the reason why a class cannot be imported; empty if it can."""
    if found.match[1].endswith(misread.SETTINGS_FILES):
        return NO_CLASS_NAME.format(found=found)
    try:
        import_by_name.function(found.match[1])
    except ValueError as error:
        return f"{found.setting}: {error}"
    return ""


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
    # jsonargparse does not name the file
    for name in (word.removeprefix("--config=") for word in sys.argv if Path(word.removeprefix("--config=")).is_file()):
        try:
            with open(name, encoding="utf-8") as file:
                yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            return f"--config {name} is no YAML: {' '.join(str(error).split())}"
    return ""


NO_CLASS_NAME = (
    "{found.setting} is {found.match[1]!r}; it takes the name of a class, module.Class. A file of settings follows "
    "--config."
)
REASONS: tuple[tuple[str, str | Callable[[Found], str]], ...] = (
    (r"Problems parsing config|Unable to load config", _no_yaml),
    (r"Option '([^']+)' is not accepted", _no_setting),
    (r"does not accept option '()([^']+)'", _no_option),
    (r"unrecognized arguments: (--?)([^\s=+]+)", _no_option),
    (
        r"unrecognized arguments: (\S+)",
        "{found.match[1]!r} belongs to no setting. A recipe follows --config: did you mean --config {found.match[1]}?",
    ),
    (r"argument (\S+): expected one argument", _no_value),
    (r"the following arguments are required: (.+)", _missing),
    (r"Expected a typing\.Literal\[(.*?)\]", _not_one_of),
    (r"Problem with given class_path '([^']+)'", _not_importable),
    (r"Expected a path but ([\w.]+\.\w+) either not accessible", _not_importable),
    (r"Expected a dot import path string: (.+)", _no_class),
    (r"Unexpected import path format: (.+)", NO_CLASS_NAME),
    (
        r"Expected an instantiatable class, but (\S+) is abstract",
        "{found.setting}: name a class, by `class_path`; {found.match[1]} is their abstract base.",
    ),
    (
        r"Not a valid subclass of (\w+)",
        "{found.setting} must be a {found.match[1]}: the name of a class, or `class_path` and `init_args`.",
    ),
    (r"Given value: .*class_path'?[=:] ?'([\w.]+)'", _not_importable),
    (rf"Expected a <class '({'|'.join(TYPES)})'>", _wrong_type),
)
"""Pattern of a line and its error, the most certain first: a setting of several types has a reason for each."""
