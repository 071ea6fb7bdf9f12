"""What counts as the value of a reward: a finite number, or a dict of them by name. Anything else has its kind."""

from __future__ import annotations

import math
from numbers import Real
from reprlib import repr as shortened
from typing import Any


class BadValueError(Exception):
    """A reward gave something that is not a reward.

    Args:
        kind: One of `lrl.rewards.failure_stats.KINDS`.
        message: What it gave, and what to do about it.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def parts_of(name: str, value: Any) -> dict[str, float]:
    """The numbers in what reward `name` gave: `{name: value}`, or `{"name/part": number}` for a dict.

    Raises:
        BadValueError: Of the kind `nan`, `wrong_type` or `wrong_shape`.
    """
    if not isinstance(value, dict):
        return {name: _number(name, value)}
    if not value:
        raise BadValueError("wrong_shape", "an empty dict; give at least one part")
    if unnamed := [part for part in value if not isinstance(part, str)]:
        raise BadValueError("wrong_type", f"a dict with the key {shortened(unnamed[0])}; name the parts with strings")
    return {f"{name}/{part}": _number(part, number) for part, number in value.items()}


def _number(part: str, value: Any) -> float:
    """Also of True and False, 1 and 0, and of what numpy or torch wrap around one number."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    given = f"{part} is {shortened(value)} ({type(value).__name__})"
    if not isinstance(value, Real):
        if _holds_several(value):
            raise BadValueError("wrong_shape", f"{given}; a reward is one number, or a dict of numbers by name")
        raise BadValueError("wrong_type", f"{given}; a reward is a float: write float(...) if that is what you mean")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadValueError("nan", f"{given}; a reward is finite")
    return number


def _holds_several(value: Any) -> bool:
    """Whether it is a list or the like."""
    return not isinstance(value, str | bytes) and hasattr(value, "__len__")
