"""Names of a room that are imported at their first use: a run imports the kinds that it names, and
not all that are shipped."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    room: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` (PEP 562) of a package, which lists its `__all__`.

    Args:
        room: The package's name.
        homes: The module of each name, without the package's name.
    """

    def of_module(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{homes[name]}"), name)

    # Without it the names that nobody has used yet would be missing where Tab completes a word.
    def names() -> list[str]:
        return list(sys.modules[room].__all__)

    return of_module, names
