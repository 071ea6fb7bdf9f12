"""The public names of lrl with their arguments, which are the settings, as text.

python -m tests.public_api        writes tests/public_api.txt again, after a change that is meant
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

SNAPSHOT = Path(__file__).with_suffix(".txt")
ROOMS = (
    "lrl",
    "lrl.advantages",
    "lrl.callbacks",
    "lrl.environments",
    "lrl.errors",
    "lrl.members.launchers",
    "lrl.objectives",
    "lrl.rewards",
    "lrl.routing.dispatch",
    "lrl.routing.length_predictor",
    "lrl.routing.migration",
    "lrl.routing.rankers",
)


def public_names() -> Iterator[tuple[str, Any]]:
    """Each public name with what it names; without an `__all__` a module's are the classes that it
    defines."""
    for room in ROOMS:
        module = import_module(room)
        defined = [name for name, value in vars(module).items() if is_class_of(value, room)]
        for name in sorted(getattr(module, "__all__", defined)):
            yield f"{room}.{name}", getattr(module, name)


def public_api() -> str:
    """A line for each public name."""
    return "".join(f"{name}{arguments_of(value)}\n" for name, value in public_names())


def is_class_of(value: Any, module: str) -> bool:
    return isinstance(value, type) and value.__module__ == module and value.__name__[0] != "_"


def arguments_of(value: Any) -> str:
    """Returns the arguments in brackets, with `=` behind those that may be left out; nothing for an
    error, a module or a type."""
    is_error = isinstance(value, type) and issubclass(value, Exception)
    if is_error or not isinstance(value, type | FunctionType):
        return ""
    shown = []
    for one in inspect.signature(value).parameters.values():
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        shown.append(f"{star}{one.name}{'' if one.default is one.empty else '='}")
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api())
