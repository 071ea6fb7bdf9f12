"""Imports: of a user's functions by name, of a room's names at their first use, and of large
libraries without Python's garbage collector.

A function is named `module:function`, `module.function`, or `file.py:function`. The current folder
is at the end of `sys.path`, and not in front as for `python -m`: a worker gets this path before it
has imported anything, and a user's `lrl` or `datasets.py` must not take the place of what this
process has imported. A file is imported under its own name with its folder on the path: a reward is
pickled by the name of its module.
"""

import ast
import gc
import importlib
import os
import pkgutil
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

FORMS = "Write module:function, or file.py:function."
MIN_SIMILARITY = 0.75
"""Least ratio of difflib between a misspelt word and the right one."""
ROOMS = (
    *("lrl", "lrl.callbacks", "lrl.members.launchers", "lrl.objectives", "lrl.rewards"),
    "lrl.routing.rankers",
)
"""Rooms whose classes a setting may name without them."""
_NAME = re.compile(r"(?P<module>.+\.py|[\w.]+):(?P<attribute>\w+(\.\w+)*)")


def is_name(text: str) -> bool:
    """Whether `text` has the form `module:function` or `file.py:function`; the function may not
    exist."""
    return _NAME.fullmatch(text) is not None


def function(name: str) -> Callable[..., Any]:
    """Returns the function, or the class, of a name: `module:function`, `package.module.function`,
    or `path/to/file.py:function`; raises ValueError if there is none, or its import failed."""
    with_current_folder()
    if match := _NAME.fullmatch(name):
        module, attribute = match["module"], match["attribute"]
    else:
        module, _, attribute = name.rpartition(".")
    found: Any = _module_of_file(Path(module)) if module.endswith(".py") else _module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            # Classes alone for the name of a class.
            known = [one for one in public_names(found) if one[0].isupper() or part[0].islower()]
            # The module may not be the one meant.
            place = getattr(found, "__file__", None) or module
            raise ValueError(f"{place} has no {part!r}.{did_you_mean(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name} is a {type(found).__name__}, not a function. {FORMS}")
    return found


def with_current_folder() -> None:
    """Adds the current folder to the end of `sys.path`."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the most similar of the `known` words, in any case; None if all are too unlike."""
    lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), lower, n=1, cutoff=MIN_SIMILARITY)
    return lower[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question for the end of a message, with the nearest word; empty without one."""
    near = nearest(word, known)
    return f" Did you mean {near}?" if near else ""


def public_names(thing: Any) -> list[str]:
    """Returns the public names in a module or a class, and the modules of a package."""
    inner = [module.name for module in pkgutil.iter_modules(getattr(thing, "__path__", ()))]
    names = (*inner, *getattr(thing, "__all__", dir(thing)))
    return [name for name in names if not name.startswith("_")]


def _module_of_file(file: Path) -> ModuleType:
    file = file.expanduser()
    if not file.is_file():
        raise ValueError(f"there is no file {str(file)!r} (looked for {file.resolve()}).")
    file = file.resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = _module(file.stem)
    if module.__file__ is None or not file.samefile(module.__file__):
        other = module.__file__ or "a part of Python"
        raise ValueError(
            f"{file} cannot be imported, another module has its name ({other}): rename the file."
        )
    return module


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} cannot be imported: {error}. {FORMS}") from error
    except Exception as error:  # a user's file may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(
            f"{name} cannot be imported: {type(error).__name__}: {error} ({last.filename}, line "
            f"{last.lineno})."
        ) from error


def lazy_names(room: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__all__`, the `__getattr__` and the `__dir__` (PEP 562) of the package `room`,
    for the names that stand under its `if TYPE_CHECKING:`.

    So a run imports the kinds that it names, and not all that are shipped. Reading the lists of all
    rooms takes 3 ms of a start.
    """
    homes = {
        alias.name: str(node.module)
        for statement in ast.parse(Path(str(sys.modules[room].__file__)).read_text("utf-8")).body
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
        for node in statement.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def of_module(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home = homes[name]
        if home == room:
            return importlib.import_module(f"{room}.{name}")
        return getattr(importlib.import_module(home), name)

    # Without it the names that nobody has used yet would be missing where Tab completes a word.
    return sorted(homes), of_module, lambda: list(sys.modules[room].__all__)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Suspends the garbage collector for the imports in its block, and exempts their objects from
    it.

    torch, transformers and vLLM make a million objects that stay, and the collector looks at them
    again and again. Side by side, in seconds of a processor: 4.9 with and 5.9 without this until
    `lrl fit` knows its settings, 7.4 and 10.4 until a generator on a CPU answers.

    Ctrl-C ends the process: numpy and matplotlib turn a KeyboardInterrupt within their import into
    other errors.
    """
    enabled = gc.isenabled()
    of_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ends = of_python and threading.current_thread() is threading.main_thread()
    gc.disable()
    if ends:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()
        if enabled:
            gc.enable()
