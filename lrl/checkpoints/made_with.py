"""The settings that saved state was made with. Each thing that is saved says those on which it depends;
where they differ at a resume, it is made anew, and the log says why."""

import inspect
import re
import zlib
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

Settings = dict[str, float | str]
"""Settings by their public names: a number as it is, all else as `fingerprint` or a word."""
PRINTED_TYPES = (bool, int, float, complex, str, bytes, np.generic, type(None))
DEFAULT_REPR: Any = object.__repr__
"""The `repr` of a class that defines none."""


def changes(saved: Settings | None, current: Settings) -> str:
    """Returns the changes since `saved` in words for the log; empty if there are none."""
    if saved is None:
        return "the checkpoint does not say what they were made with"
    found = []
    for name in saved | current:
        before, after = saved.get(name), current.get(name)
        if isinstance(before, int | float) and isinstance(after, int | float) and before != after:
            found.append(f"{name} was {before:g} and is {after:g}")
        elif before != after:
            found.append(f"{name} has changed")
    return ", ".join(found)


def fingerprint(value: Any) -> str:
    """Returns a text that changes with a value and is the same in every process.

    Of a function or a class it covers the name and the source code, of another object its class and
    its attributes. What they import is not covered.
    """
    return f"{zlib.crc32(_text(value, set()).encode(errors='surrogatepass')):08x}"


def _text(value: Any, seen: set[int]) -> str:
    """Writes a value down; `seen` has the ids of objects whose attributes are written already."""
    kind = type(value)
    if isinstance(value, PRINTED_TYPES):
        return f"{kind.__name__} {value!r}"
    if isinstance(value, Mapping):
        pairs = sorted((_text(key, seen), _text(each, seen)) for key, each in value.items())
        return f"{kind.__name__} {pairs}"
    if isinstance(value, Set):  # in every process in another order
        return f"{kind.__name__} {sorted(_text(each, seen) for each in value)}"
    if isinstance(value, list | tuple):
        return f"{kind.__name__} {[_text(each, seen) for each in value]}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {_text(value.tolist(), seen)}"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}"
    if callable(value) and hasattr(value, "__qualname__"):  # a function or a class
        return f"{value.__module__}.{value.__qualname__} {_source(value)}"
    if kind.__repr__ is not DEFAULT_REPR:
        return f"{kind.__qualname__} {re.sub(' at 0x[0-9a-f]+', '', repr(value))}"
    if id(value) in seen or not hasattr(value, "__dict__"):
        return kind.__qualname__
    seen.add(id(value))
    return f"{kind.__qualname__} {_text(vars(value), seen)}"


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # built in, or typed at a prompt
        return ""
