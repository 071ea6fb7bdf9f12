"""Imports that cost less: a room's names at their first use, and large libraries without Python's
garbage collector."""

import ast
import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any


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
            return import_module(f"{room}.{name}")
        return getattr(import_module(home), name)

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
    on_interrupt = signal.getsignal(signal.SIGINT)
    of_python = on_interrupt is signal.default_int_handler
    ends = of_python and threading.current_thread() is threading.main_thread()
    gc.disable()
    if ends:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ends:
            signal.signal(signal.SIGINT, on_interrupt)
        gc.freeze()
        if enabled:
            gc.enable()
