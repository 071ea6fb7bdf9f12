"""Imports of a user's functions by name: `module:function`, `module.function`, or
`file.py:function`.

Rewards, prompt sources and model functions are all found here. The current folder is at the end of
`sys.path`, and not in front as for `python -m`: a reward worker gets this path before it has
imported anything, and a user's `lrl` or `datasets.py` must not take the place of what this process
has imported. A file is imported under its own name with its folder on the path, not as an anonymous
module: a reward is pickled by the name of its module.
"""

import importlib
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

FORMS = "Write module:function, or file.py:function."
MIN_SIMILARITY = 0.75
"""Least share of letters that a misspelt word has in common with the right one (difflib's
ratio)."""
MANY_NAMES = 12
_NAME = re.compile(r"(?P<module>.+\.py|[\w.]+):(?P<attribute>\w+(\.\w+)*)")


def is_name(text: str) -> bool:
    """Whether `text` has the form `module:function` or `file.py:function`; the function may not
    exist."""
    return _NAME.fullmatch(text) is not None


def function(name: str) -> Callable[..., Any]:
    """Returns a function, or a class.

    Args:
        name: `module:function`, `package.module.function`, or `path/to/file.py:function`.

    Raises:
        ValueError: A part of the name does not exist, its import failed, or it cannot be called.
            The caller adds the name of the setting.
    """
    with_current_folder()
    if name.endswith(".py"):
        raise ValueError(f"it names a file and no function in it. Write {name}:function.")
    if match := _NAME.fullmatch(name):
        module, attribute = match["module"], match["attribute"]
    else:
        module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"it names no module. {FORMS}")
    found: Any = _module_of_file(Path(module)) if module.endswith(".py") else _module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = [
                name for name in public_names(found) if name[0].isupper() or not part[0].isupper()
            ]
            near = did_you_mean(part, known) or _own_names(found)
            raise ValueError(f"{_named(found, module)} has no {part!r}.{near}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, not a function. {FORMS}")
    return found


def with_current_folder() -> None:
    """Adds the current folder to the end of `sys.path`."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the most similar of the `known` words; None if all are too unlike, for a wrong one
    would mislead.

    Case does not matter.
    """
    lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), lower, n=1, cutoff=MIN_SIMILARITY)
    return lower[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question for the end of a message, with the nearest of the `known` words; empty
    without one."""
    near = nearest(word, known)
    return f" Did you mean {near}?" if near else ""


def public_names(thing: Any) -> list[str]:
    """Returns the public names in a module or a class, and the modules of a package."""
    inner = [module.name for module in pkgutil.iter_modules(getattr(thing, "__path__", ()))]
    return [
        name
        for name in (*inner, *getattr(thing, "__all__", dir(thing)))
        if not name.startswith("_")
    ]


def _own_names(module: Any) -> str:
    """Returns a sentence with what a module defines itself; empty if that is nothing, or more than
    a reader would look through."""
    own = [
        name
        for name in public_names(module)
        if getattr(getattr(module, name, None), "__module__", None) == module.__name__
    ]
    return f" It has {', '.join(own)}." if 0 < len(own) <= MANY_NAMES else ""


def _module_of_file(file: Path) -> ModuleType:
    file = file.expanduser()
    if not file.is_file():
        near = did_you_mean(file.name, (other.name for other in file.parent.glob("*.py")))
        raise ValueError(f"there is no file {str(file)!r} (looked for {file.resolve()}).{near}")
    file = file.resolve()
    if not file.stem.isidentifier():
        raise ValueError(
            f"Python cannot import a file with the name {file.name!r}: use only letters, digits "
            "and _."
        )
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = _module(file.stem)
    if module.__file__ is None or not file.samefile(module.__file__):
        other = module.__file__ or "a part of Python"
        raise ValueError(
            f"{file} cannot be imported, another module has its name ({other}): rename the file."
        )
    return module


def _named(found: Any, name: str) -> str:
    """Returns a name, for a module with its file, which may not be the one that was meant."""
    file = getattr(found, "__file__", None)
    return name if file is None or name.endswith(".py") else f"{name} ({file})"


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a user's file may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and f"{name}.".startswith(f"{absent}."):
            near = did_you_mean(name, _neighbours(name))
            raise ValueError(f"there is no module {name!r}.{near or f' {FORMS}'}") from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        file = last.filename
        line = last.lineno
        text = str(error)
        if isinstance(error, SyntaxError):
            file = error.filename or file
            line = error.lineno
            text = error.msg
        kind = type(error).__name__
        message = (
            f"{name} cannot be imported: {kind}: {text} ({file}, line {line}). Correct the file."
        )
        raise ValueError(message) from error


def _neighbours(name: str) -> list[str]:
    """Returns the modules next to `name`: in its package, or in the current folder."""
    if package := name.rpartition(".")[0]:
        return [f"{package}.{other}" for other in public_names(_module(package))]
    return [file.stem for file in Path().glob("*.py")]
