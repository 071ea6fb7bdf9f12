"""Names of a room that are imported at their first use: a run imports the kinds that it names, and
not all that are shipped.

A room lists them once, as imports for type checkers. Reading the lists of all rooms takes 3 ms of a
start.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(room: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__all__`, the `__getattr__` and the `__dir__` (PEP 562) of a package, for the
    names that stand under its `if TYPE_CHECKING:`.

    Args:
        room: The package's name.
    """
    homes = _imports_for_type_checkers(Path(str(sys.modules[room].__file__)))

    def of_module(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home = homes[name]
        return (
            import_module(f"{room}.{name}") if home == room else getattr(import_module(home), name)
        )

    # Without it the names that nobody has used yet would be missing where Tab completes a word.
    def names() -> list[str]:
        return list(sys.modules[room].__all__)

    return sorted(homes), of_module, names


def _imports_for_type_checkers(file: Path) -> dict[str, str]:
    """Returns the module of each name that a file imports under `if TYPE_CHECKING:`."""
    blocks = [
        statement.body
        for statement in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    ]
    return {
        alias.name: str(node.module)
        for block in blocks
        for node in block
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
