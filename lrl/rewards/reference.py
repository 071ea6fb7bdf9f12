"""The reference answer of a row: a column's value as the text that a right response would have."""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def written_out(value: Any) -> str:
    """Returns a reference answer as text, a number without an exponent.

    JSON's 0.00005 is `5e-05` in Python.

    Raises:
        ValueError: It is missing (None or NaN), infinite, or a collection.
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy or torch
        value = value.item()
    is_fraction = isinstance(value, float | Decimal)
    is_missing = value is None or (is_fraction and not math.isfinite(value))
    if is_missing or isinstance(value, bytes | list | tuple | set | dict):
        raise ValueError(f"{value!r:.80} ({type(value).__name__}) is neither a text nor a number")
    return f"{Decimal(str(value)):f}" if is_fraction else str(value)


def reference_of(columns: Mapping[str, Any], name: str) -> str:
    """Returns the reference answer in a column of a row.

    Raises:
        ValueError: The row has no such column, or no answer in it.
    """
    if name not in columns:
        raise ValueError(f"the row has no column `{name}`, only {sorted(columns)}")
    try:
        return written_out(columns[name])
    except ValueError as error:
        raise ValueError(f"the column `{name}`: {error}") from error


def trial_response(columns: Mapping[str, Any]) -> str:
    """Returns the text of a row's reference answer, or `0` if there is none."""
    for name in ("answer", "solution"):
        value = columns.get(name)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if is_number or (isinstance(value, str) and value):
            return written_out(value)
    return "0"
