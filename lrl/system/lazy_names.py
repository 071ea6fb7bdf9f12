"""Names of a room that are imported at their first use: a run imports the kinds that it names, and
not all that are shipped."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` (PEP 562) of a package.

    Args:
        room: The package's name.
        homes: The module of each name, without the package's name.
    """

    def of_module(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f"{room}.{homes[name]}"), name)

    return of_module
