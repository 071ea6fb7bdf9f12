"""Tools for tests."""

from __future__ import annotations

import asyncio
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


def odd(what: str) -> Any:
    """Does something odd.

    Args:
        what: What it does.
    """
    match what:
        case "object":
            return object()
        case "none":
            return None
        case "words":
            return "word " * 999
        case "surrogate":
            return "\ud800"
        case "long":
            raise ValueError("x" * 5000)
        case "exit":
            raise SystemExit(3)
        case "memory":
            raise MemoryError
    return {"what": [what, 1.5]}
