"""The recipe's calculator with a fault that strikes a share of the turns, the same ones in every
run.

Environment processes import this module when they start, and hundreds of them are replaced: it
imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import uuid
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from lrl.environments.turns import Answer
from lrl.quickstart import task
from lrl.quickstart.calculator import Calculator

KINDS = {
    "exception": "environment_error",
    "crash": "environment_error",
    "killed": "environment_error",
    "memory": "environment_error",
    "hang": "tool_timeout",
    "sleep": "tool_timeout",
}
"""Each fault, and the kind as which lrl has to count it."""

_hoard: list[bytes] = []


def problems() -> list[dict[str, Any]]:
    return [{**row, "struck": True} for row in task.problems()]


class FaultyCalculator(Calculator):
    """A calculator, except where the fault strikes.

    Args:
        fault: From `KINDS`; empty for none.
        share: Of the turns, 0 to 1.
        marks: Folder that gets a file for each strike, before it.
    """

    def __init__(self, fault: str, share: float, marks: str) -> None:
        self.fault = fault
        self.share = share
        self.marks = marks
        self._prompt = ""

    def start(self, prompt: str, **columns: Any) -> None:
        self._prompt = prompt if columns.get("struck") else ""

    def reply(self, turn: str) -> Answer | Awaitable[Answer]:  # type: ignore[override]
        if self._strikes(turn):
            (Path(self.marks) / uuid.uuid4().hex).touch()
            return self._commit()
        return super().reply(turn)

    def _strikes(self, turn: str) -> bool:
        if not self.fault or not self._prompt:
            return False
        digest = hashlib.sha256(f"{self._prompt}|{turn}".encode()).hexdigest()
        return int(digest[:8], 16) < self.share * 2**32

    def _commit(self) -> Answer | Awaitable[Answer]:
        match self.fault:
            case "exception":
                raise LookupError("a fault on purpose")
            case "crash":
                ctypes.string_at(0)
            case "killed":
                os.kill(os.getpid(), 9)
            case "memory":
                while True:
                    _hoard.append(bytes(2**26))
            case "sleep":
                return self._sleep()
        while True:  # hang
            pass

    async def _sleep(self) -> Answer:
        await asyncio.sleep(3600)
        return "", True, 0.0
