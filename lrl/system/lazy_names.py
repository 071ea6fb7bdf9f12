"""Names of a room that are imported at their first use: a run imports the kinds that it names, and
not all that are shipped.

A room lists them once, as imports for type checkers.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from lrl.system.aliases import objective


def lazy_names(room: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__all__`, the `__getattr__` and the `__dir__` (PEP 562) of a package, for the
    names that stand under its `if TYPE_CHECKING:`.

    Args:
        room: The package's name.
    """
    homes = dict(_imports_for_type_checkers(str(sys.modules[room].__file__)))

    def of_module(name: str) -> Any:
        if name not in homes:
            message = f"module {room!r} has no attribute {name!r}"
            if known := objective(name):
                # With the room as `obj` Python would ask: did you mean GSPO?
                raise AttributeError(f"{message}. {known}", name=name, obj=None)
            raise AttributeError(message)
        home = homes[name]
        return (
            import_module(f"{room}.{name}") if home == room else getattr(import_module(home), name)
        )

    # Without it the names that nobody has used yet would be missing where Tab completes a word.
    def names() -> list[str]:
        return list(sys.modules[room].__all__)

    return sorted(homes), of_module, names


def _imports_for_type_checkers(file: str) -> Iterator[tuple[str, str]]:
    """Yields each name that a file imports under `if TYPE_CHECKING:`, and from which module."""
    for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for node in statement.body:
                if isinstance(node, ast.ImportFrom):
                    yield from ((alias.name, str(node.module)) for alias in node.names)
