"""jsonargparse's errors in short: the setting, its fault, and the nearest valid name.

jsonargparse nests messages by indentation: one for each class on the way to the setting, and one
for each type that the setting may have. The first of `REASONS` that matches one of its lines
becomes the error, with the setting's whole name; of several lines it is the one about the innermost
setting. A message without a match is shown without the lines that every optional setting repeats.
"""

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from lrl.cli import config_file, fit_help, misread
from lrl.cli.recipes import recipes
from lrl.system import aliases, import_by_name

NOISE = (
    "Does not validate against any",
    "Subtypes:",
    "Expected a <class 'NoneType'>",
    "Given value",
    "Errors:",
)
"""Beginnings of lines that only repeat the types of optional settings."""
OTHER_TYPES = (
    *(
        "Expected a <class",
        "Not a valid subclass of",
        "Subclass types expect",
        "Type collections.abc.Callable",
    ),
    *("a class path (str)", "a dict with"),
)
"""Beginnings of lines about the types that a setting might have instead, after the error of a class
that it names."""
WITHOUT_GENERATORS = "lightning.pytorch.strategies"
"""Lightning's own strategies, which nobody should be led to."""
MOST_LISTED = 12
"""Most classes that are listed where none is near."""
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list, as in [1, 2]",
    "Sequence": "a list, as in [1, 2]",
    "tuple": "a list, as in [1, 2]",
    "dict": "a mapping, as in {name: value}",
}
EVERY_CALLBACK = "lightning.Callback"
"""jsonargparse also tries whether a setting of the last callback is one of this class, which has
none."""
YAML_WORDS = {"None": "null", "True": "true", "False": "false"}
"""Python's words for values, and YAML's words."""


class Found(NamedTuple):
    """A matched line of the message, and the setting it is about."""

    match: re.Match[str]
    setting: str
    """The whole name of the setting; empty if the message is about none."""
    owner: str
    """Path of the innermost class around it; empty if there is none."""
    message: str
    start: int
    """Place of the line in the message."""
    depth: int
    """Keys on the way to the setting: the more, the more certain is the line."""

    @property
    def value(self) -> str:
        """The setting's value, as far as the message has it."""
        pattern = r"(?:Got|Given) value: (?:NestedArg\(.*val='?(.*?)'?\)$|(.*))"
        values = re.findall(pattern, self.message[self.start :], re.MULTILINE)
        found = next((part for part in values[0] if part), "") if values else ""
        return YAML_WORDS.get(found, found)

    @property
    def bases(self) -> list[type]:
        """Classes of which the setting takes subclasses, as far as the message has them."""
        kinds = re.findall(r"Subtypes: \[(.*)\]", self.message[: self.start])[-1:]
        found = []
        for path in re.findall(r"[\w.]+\.[A-Z]\w*", kinds[0] if kinds else ""):
            module, _, name = path.rpartition(".")
            with suppress(ImportError, AttributeError):  # a class within another one
                found.append(getattr(import_module(module), name))
        return [
            kind
            for kind in found
            if inspect.isclass(kind) and not kind.__module__.startswith("collections")
        ]


def explain(message: str) -> str:
    """Returns the text of one error for a parser's message."""
    for pattern, reason in REASONS:
        found = [_found_setting(match, message) for match in re.finditer(pattern, message)]
        for one in sorted(found, key=lambda one: -one.depth):
            if text := reason.format(found=one) if isinstance(reason, str) else reason(one):
                return text
    return without_noise(message)


def without_noise(message: str) -> str:
    """Returns a parser's message without the lines that every optional setting adds."""
    return "\n".join(
        line
        for line in message.splitlines()
        if line.strip() and not line.strip(" -").startswith(NOISE)
    )


def explain_constructor(message: str) -> str:
    """Returns the text for a constructor's error; jsonargparse puts it among the types that the
    setting might have."""
    if NOISE[0] not in message:
        return message
    lines = [line.strip(" -") for line in without_noise(message).splitlines()]
    setting_lines = [line for line in dict.fromkeys(lines) if not line.startswith(OTHER_TYPES)]
    return "\n".join(setting_lines or lines)


def explain_prompt_row(words: Iterable[str]) -> str:
    """Returns the error for the first word that is no setting of `lrl.Prompts`; it was taken for a
    row of prompts."""
    known = [f"data.prompts.{name}" for name in sorted(settings_of("lrl.Prompts"))]
    for word in (word.partition("=")[0].replace(".init_args.", ".") for word in words):
        name = word.removeprefix("--")
        if word.startswith("--data.prompts.") and name not in known:
            return f"{word}: there is no such setting.{_instead(name, known, '--')}"
    return ""


def settings_of(class_path: str) -> set[str]:
    """Returns the settings of a class: the arguments of its constructor and its bases'
    constructors."""
    module, _, name = class_path.rpartition(".")
    bases = inspect.getmro(getattr(import_module(module), name))
    with_constructor: list[Any] = [base for base in bases if "__init__" in vars(base)]
    taken = (inspect.signature(base.__init__).parameters for base in with_constructor)
    return {name for parameters in taken for name in parameters} - {"self", "args", "kwargs"}


def _found_setting(match: re.Match[str], message: str) -> Found:
    """Returns a match with the setting that its line is about: the keys and classes of the lines
    around it."""
    start = message.rfind("\n", 0, match.start()) + 1
    line, *_ = message[start:].splitlines()
    keys: list[str] = []
    classes: list[str] = []
    indent = len(line)
    for above in filter(str.strip, reversed([*message[:start].splitlines(), line])):
        if (depth := len(above) - len(above.lstrip())) < indent:
            indent = depth
            keys += re.findall(r'Parser key "([^"]+)"', above)
            classes += re.findall(r"Problem with given class_path '([^']+)'", above)
    return Found(
        match,
        ".".join(reversed(keys)),
        owner=classes[0] if classes else "",
        message=message,
        start=start,
        depth=len(keys),
    )


def _no_setting(found: Found) -> str:
    if found.owner == EVERY_CALLBACK:
        return ""
    name = f"{found.setting}.{found.match[1]}".lstrip(".")
    known = [f"{found.setting}.{one}".lstrip(".") for one in sorted(settings_of(found.owner))]
    return f"{name}: {found.owner} has no such setting.{_instead(name, known)}"


def _no_option(found: Found) -> str:
    dashes = found.match[1]
    name = found.match[2].replace(".init_args.", ".")
    return f"{dashes}{name}: there is no such setting.{_instead(name, None, '--')}"


def _instead(name: str, of_class: list[str] | None, dashes: str = "") -> str:
    """Returns the replacement for a setting's name; empty if none is certain.

    Args:
        name: A name without dashes.
        of_class: Names of the settings of the class that it was meant for; None if it names no
            class.
        dashes: What a setting begins with, as the name that was written did.
    """
    if meant := aliases.setting(name):
        return f" {meant}"
    last = name.rpartition(".")[2]
    others = fit_help.all_settings()
    same = [one for one in others if one.rpartition(".")[2] == last]
    words = {one.rpartition(".")[2]: one for one in (others if of_class is None else of_class)}
    near = words.get(import_by_name.nearest(last, words) or "")
    if same and (near is None or of_class is None):
        near = f" or {dashes}".join(same)
    return f" Did you mean {dashes}{near}?" if near else ""


def _no_words(found: Found) -> str:
    word = found.match[1]
    name, sign, value = word.partition("=")
    if word in recipes() or Path(word).is_file():
        return (
            f"{word!r} belongs to no setting. A recipe follows --config: did you mean --config "
            f"{shlex.quote(word)}?"
        )
    if not sign:
        return f"{word!r} belongs to no setting; a setting is written --NAME VALUE."
    if name in fit_help.all_settings():
        return f"{word!r} belongs to no setting. Did you mean --{name} {shlex.quote(value)}?"
    return (
        f"{word!r} belongs to no setting; a setting is written --NAME "
        f"VALUE.{_instead(name, None, '--')}"
    )


def _no_value(found: Found) -> str:
    # argparse names only the outermost setting; the command has the whole name
    option = found.match[1].rpartition("/")[2]
    words = [*sys.argv[1:], "--"]
    pairs = zip(words, words[1:], strict=False)
    bare = (
        word
        for word, after in pairs
        if word.startswith(option) and "=" not in word and after.startswith("--")
    )
    return f"{next(bare, option)}: no value follows it."


def _no_class(found: Found) -> str:
    """Returns the error about the name of a class, with the nearest name that the setting takes."""
    name = found.match[1]
    if broken := _broken_yaml(name):
        return f"{found.setting}{broken}"
    fault = f"{found.setting}: there is no class {name!r}."
    if elsewhere := _objective_elsewhere(found, name):
        return f"{fault} {elsewhere}"
    classes = sorted(set().union(*map(_subclasses, found.bases)))
    word = name.rpartition(".")[2]
    begun = [one for one in classes if one.lower().startswith(word.lower())]
    near = begun[0] if len(begun) == 1 else import_by_name.nearest(word, classes)
    if near is not None:
        return f"{fault} Did you mean {near}?"
    if 0 < len(classes) <= MOST_LISTED:
        return (
            f"{fault} There {'is' if len(classes) == 1 else 'are'} {', '.join(classes)}; or write "
            "module.Class."
        )
    return f"{fault} Write module.Class."


def _objective_elsewhere(found: Found, name: str) -> str:
    return aliases.objective(name) if found.setting.endswith("model.objective") else ""


def _subclasses(base: type) -> set[str]:
    """Returns the names of the shipped classes that a setting of type `base` takes."""
    package = base.__module__.rpartition(".")[0]
    rooms = {"lrl", package, f"lrl.{package.rpartition('.')[2]}"} - {"", "lrl.", WITHOUT_GENERATORS}
    if not package.startswith("lightning"):  # whose file of a base has classes for tests, too
        rooms.add(base.__module__)
    found = set()
    for room in rooms:
        module = import_module(room) if find_spec(room) else None
        for name in import_by_name.public_names(module):
            kind = getattr(module, name) if name[0].isupper() else None
            if inspect.isclass(kind) and issubclass(kind, base) and not inspect.isabstract(kind):
                found.add(name)
    return found - {base.__name__} or found


def _not_importable(found: Found) -> str:
    """Returns the reason why a class cannot be imported; empty if it can."""
    if found.match[1].endswith(misread.SETTINGS_FILES):
        return NO_CLASS_NAME.format(found=found)
    try:
        import_by_name.function(found.match[1])
    except ValueError as error:
        elsewhere = _objective_elsewhere(found, found.match[1])
        return (
            f"{found.setting}: {str(error).partition(' Did you')[0] if elsewhere else error} "
            f"{elsewhere}"
        ).rstrip()
    return ""


def _not_one_of(found: Found) -> str:
    choices = [choice.strip(" '\"") for choice in found.match[1].split(",")]
    near = import_by_name.did_you_mean(found.value, choices)
    others = "".join(f", or {kind}" for kind in _kinds(found))
    return (
        f"{found.setting} is {found.value!r}; it must be one of {', '.join(choices)}{others}.{near}"
    )


def _wrong_type(found: Found) -> str:
    if broken := _broken_yaml(found.value):
        return f"{found.setting}{broken}"
    value = found.value if found.value == "null" else repr(found.value)
    return f"{found.setting} is {value}; it must be {' or '.join(_kinds(found))}."


def _kinds(found: Found) -> list[str]:
    """Returns the plain types that the setting may have, in words."""
    lines = re.finditer(r"Expected a <class '(?:collections\.abc\.)?(\w+)'>", found.message)
    kinds = [
        line[1] for line in lines if _found_setting(line, found.message).setting == found.setting
    ]
    return list(dict.fromkeys(TYPES[kind] for kind in kinds if kind in TYPES))


def _broken_yaml(value: str) -> str:
    """Returns the fault of a list or mapping in a value; empty if the value is neither, or has
    none."""
    return config_file.fault_of(value) if value.startswith(("[", "{")) else ""


def _missing(found: Found) -> str:
    names = re.sub(r"\b(fit|validate)\.", "", found.match[1]).split(", ")
    if not found.owner:
        return (
            f"{' and '.join(sorted(names))} must be given: by a recipe (--config quickstart), or "
            "one by one."
        )
    paths = " and ".join(f"{found.setting}.{name}" for name in names)
    return (
        f"{paths} must be given: {found.owner} has no default for "
        f"{'it' if len(names) == 1 else 'them'}."
    )


def _no_yaml(found: Found) -> str:
    """Returns the fault of a YAML file that a YAML file names; `check_files` has checked the
    command's own files."""
    name = found.match[1]
    words = (word.rpartition("=")[2] for word in sys.argv[1:])
    folders = [Path(word).parent for word in words if word.endswith(config_file.SUFFIXES)]
    path = next(
        (one for one in (Path(name), *(folder / name for folder in folders)) if one.is_file()), None
    )
    setting = found.setting or re.findall(r'Parser key "([^"]+)"', found.message)[0]
    if path is None:
        return f"{setting} is {name!r}: there is no such file."
    text, fault = config_file.read(path)
    return (
        f"{setting}: "
        f"{path}{fault or config_file.fault_of(text) or config_file.unlike_settings(text)}"
    )


def _no_class_name(found: Found) -> str:
    fault = NO_CLASS_NAME.format(found=found)
    if of_file := CLASS_OF_FILE.fullmatch(found.match[1]):
        return f"{fault} Did you mean {of_file[1].replace('/', '.')}.{of_file[2]}?"
    return fault


def _abstract(found: Found) -> str:
    name = found.match[1] or found.value
    if name.startswith("lrl."):
        return f"{found.setting}: name a class, by `class_path`; {name} is their abstract base."
    lacking = getattr(import_by_name.function(name), "__abstractmethods__", ())
    return f"{found.setting} is {name!r}, which lacks {', '.join(sorted(lacking))}: define it."


NO_CLASS_NAME = (
    "{found.setting} is {found.match[1]!r}; it takes the name of a class, module.Class. A file of "
    "settings follows --config."
)
CLASS_OF_FILE = re.compile(r"(?:\./)?([\w/]+)\.py:(\w+)")
"""A class, named as a function may be."""
REASONS: tuple[tuple[str, str | Callable[[Found], str]], ...] = (
    (r"Unable to load config '([^']+)'", _no_yaml),
    (
        r"codec can't decode",
        "{found.setting} names a file that is no UTF-8 text. Save the file as UTF-8.",
    ),
    (r"Expected a path but (\S+\.ya?ml) either not accessible", _no_yaml),
    (r"Option '([^']+)' is not accepted", _no_setting),
    (r"does not accept option '()([^']+)'", _no_option),
    (r"unrecognized arguments: (--?)([^\s=+]+)", _no_option),
    (r"unrecognized arguments: (\S+)", _no_words),
    (r"argument (\S+): expected one argument", _no_value),
    (r"the following arguments are required: (.+)", _missing),
    (r"Expected a typing\.Literal\[(.*?)\]", _not_one_of),
    (r"Problem with given class_path '([^']+)'", _not_importable),
    (r"Expected a path but ([\w.]+\.\w+) either not accessible", _not_importable),
    (r"Expected a dot import path string: (.+)", _no_class),
    (r"Unexpected import path format: (.+)", _no_class_name),
    (r"Expected an instantiatable class, but (\S*?) ?is abstract", _abstract),
    (
        r"Import path does not correspond to a subclass of (\w+)",
        "{found.setting} is {found.value!r}, which is no {found.match[1]}: name a class of that kind.",
    ),
    (
        r"Not a valid subclass of (\w+)",
        "{found.setting} must be a {found.match[1]}: the name of a class, or `class_path` and "
        "`init_args`.",
    ),
    (r"Given value: .*class_path'?[=:] ?'([\w.]+)'", _not_importable),
    (
        r"Expected a tuple with (\d+) elements",
        "{found.setting} is {found.value}; it must be a list of {found.match[1]} values.",
    ),
    (rf"Expected a <class '(?:collections\.abc\.)?({'|'.join(TYPES)})'>", _wrong_type),
)
"""Pattern of a line and its error, the most certain first: a setting of several types has a reason
for each."""
