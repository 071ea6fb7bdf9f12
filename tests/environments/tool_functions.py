"""Tools for tests."""

from __future__ import annotations

import asyncio
import sys  # noqa: F401 (for `python`)
from typing import Any

STARTED: list[str] = []
"""The calls of `slow` in this process, as they begin and end."""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


async def slow(name: str) -> str:
    """Waits a while.

    Args:
        name: The name of the wait.
    """
    STARTED.append(f"{name} begins")
    await asyncio.sleep(0.05)
    STARTED.append(f"{name} ends")
    return name


def python(expression: str) -> Any:
    """Returns the value of an expression.

    Args:
        expression: In Python.
    """
    return eval(expression)
