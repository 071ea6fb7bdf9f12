"""What a line of `rollouts.jsonl` must have, so that it can be listed and shown.

lrl writes such lines; somebody may have changed the file by hand, or made it by another program.
"""

from __future__ import annotations

import json
import sys
from typing import Any

Form = type | tuple[type, ...] | list[Any] | dict[str, Any]
"""A type; several; a list with the form of its entries, and None if it may be null; or an object with
the forms of the fields that it must have."""

NULL = type(None)
NUMBER = (int, float, NULL)
PAIRS = [[object]]
GROUP = {
    "step": int,
    "index": int,
    "prompt_id": int,
    "prompt": str,
    "responses": [
        {"reward": NUMBER, "lag": (int, NULL), "finish_reason": str, "failure": str},
    ],
}
PROMPT = {
    "text": str,
    "answer": (str, NULL),
    "messages": [{"role": str, "content": str}, None],
    "token_ids": [int],
    "texts": [str],
}
RESPONSE = {
    "token_ids": [int],
    "texts": [str],
    "logprobs": [NUMBER],
    "versions": PAIRS,
    "trained": PAIRS,
    "log_ratios": [NUMBER, None],
    "advantages": [[object], None],
    "forks": [[int]],
    "turn_ends": [int],
    "turn_rewards": [NUMBER],
    "reward": NUMBER,
    "parts": dict,
    "finish_reason": str,
    "failure": str,
}


def parsed(line: bytes, form: Form) -> dict[str, Any]:
    """Returns the object of a line; raises ValueError, with the fault, if it is no such one."""
    try:
        found = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", error)  # without the number of the line, which is always 1
        raise ValueError(f"it is no JSON ({reason})") from error
    if fault := fault_of(found, form, "it"):
        raise ValueError(fault)
    return found


def fault_of(value: Any, form: Form, name: str) -> str:
    """Returns what is wrong with a value; empty if nothing is."""
    if isinstance(form, dict) and isinstance(value, dict):
        return _fault_of_fields(value, form, name)
    if isinstance(form, list) and isinstance(value, list):
        faults = (fault_of(entry, form[0], f"an entry of {name}") for entry in value)
        return next(filter(None, faults), "")
    if isinstance(form, list) and value is None and form[-1] is None:
        return ""
    if not isinstance(form, dict | list) and isinstance(value, form) and not _is_endless(value):
        return ""
    return f"{name} is {value!r:.60}"


def _fault_of_fields(value: dict[str, Any], form: dict[str, Any], name: str) -> str:
    for field, its_form in form.items():
        if field not in value:
            return f"{name} has no `{field}`"
        if fault := fault_of(value[field], its_form, f"`{field}`"):
            return fault
    return ""


def _is_endless(value: Any) -> bool:
    """Whether a value is a number that JSON can write and no float can hold, such as 1e999."""
    return isinstance(value, int | float) and abs(value) > sys.float_info.max


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
