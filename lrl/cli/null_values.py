"""Settings that are null and may not be.

jsonargparse lets null pass for a class's setting of any type, as for one that is not given.
"""

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

import lightning as L
from jsonargparse import Namespace

from lrl.system.import_by_name import function


def find(run: Namespace) -> Iterator[str]:
    """Yields an error for each setting that is null although its type does not allow it.

    Args:
        run: What `lrl fit` would use, before anything is built.
    """
    yield from _of_class(L.Trainer, run.trainer, "trainer")
    for group in ("model", "data"):
        yield from _within(run[group], group)


def _within(value: Any, name: str) -> Iterator[str]:
    """Yields the errors about the classes in a value."""
    if isinstance(value, list):
        for item in value:
            yield from _within(item, name)
    elif isinstance(value, Namespace) and "class_path" in value:
        yield from _of_class(function(value.class_path), value.get("init_args", Namespace()), name)


def _of_class(kind: Any, settings: Namespace, name: str) -> Iterator[str]:
    parameters = _parameters(kind)
    for setting, value in vars(settings).items():
        parameter = parameters.get(setting)
        if isinstance(value, Namespace) and "class_path" not in value:  # of a dataclass
            for inner in filter(is_dataclass, get_args(parameter.annotation) if parameter else ()):
                yield from _of_class(inner, value, f"{name}.{setting}")
        else:
            yield from _within(value, f"{name}.{setting}")
        if value is None and parameter is not None and not _may_be_null(parameter):
            remedy = f"give a value, or leave it out for its default, {parameter.default!r}"
            yield f"{name}.{setting} is null: {remedy}."


def _parameters(kind: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a constructor, and those that it hands to its bases."""
    found: dict[str, inspect.Parameter] = {}
    for base in inspect.getmro(kind) if inspect.isclass(kind) else ():
        if init := vars(base).get("__init__"):
            hints = _hints(init)
            for name, parameter in inspect.signature(init).parameters.items():
                kind = hints.get(name, parameter.annotation)
                found.setdefault(name, parameter.replace(annotation=kind))
    return found


def _hints(init: Any) -> dict[str, Any]:
    try:
        return get_type_hints(init)
    except (NameError, TypeError):  # a name that only type checkers import
        return {}


def _may_be_null(parameter: inspect.Parameter) -> bool:
    kinds = str(parameter.annotation)
    unknown = parameter.annotation is inspect.Parameter.empty or "Any" in kinds or "object" in kinds
    return parameter.default is None or unknown or "None" in kinds or "Optional" in kinds
