"""The quickstart's reward and its calculator with a fault that strikes a share of the responses, or of
the turns: the same ones in every run.

Workers import this module when they start, and hundreds of them are replaced: it imports nothing
heavy.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lrl.environments.turns import Answer
from lrl.quickstart import task
from lrl.quickstart.calculator import Calculator
from lrl.rewards import Reward

_hoard: list[bytes] = []


def _raise() -> Any:
    raise LookupError("a fault on purpose")


def _loop() -> Any:
    while True:
        pass


def _hog() -> Any:
    while True:
        _hoard.append(bytes(2**26))


async def _sleep() -> Answer:
    await asyncio.sleep(3600)
    return "", True, 0.0


OF_REWARDS: dict[str, Callable[[], Any]] = {
    "exception": _raise,
    "crash": lambda: ctypes.string_at(0),
    "timeout": _loop,
    "memory": _hog,
    "nan": lambda: float("nan"),
    "wrong_type": lambda: "1.0",
    "wrong_shape": lambda: [1.0],
}
"""By the kind as which lrl has to count it."""
OF_ENVIRONMENTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "exception": ("environment_error", _raise),
    "crash": ("environment_error", lambda: ctypes.string_at(0)),
    "killed": ("environment_error", lambda: os.kill(os.getpid(), 9)),
    "memory": ("environment_error", _hog),
    "hang": ("tool_timeout", _loop),
    "sleep": ("tool_timeout", _sleep),
}
"""Each fault with the kind as which lrl has to count it."""


def is_struck(share: float, *parts: object) -> bool:
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return int(digest[:8], 16) < share * 2**32


class FaultyReward(Reward):
    """`correct`, except where the fault `kind` strikes (empty for none): a share of the responses,
    0 to 1, which the seed decides."""

    def __init__(self, kind: str, share: float, seed: int) -> None:
        super().__init__(name="correct")
        self.kind = kind
        self.share = share
        self.seed = seed

    def strikes(self, prompt: str, response: str) -> bool:
        return bool(self.kind) and is_struck(self.share, self.seed, prompt, response)

    def __call__(self, prompt: str, response: str, **columns: Any) -> Any:
        if self.strikes(prompt, response):
            return OF_REWARDS[self.kind]()
        return task.correct(prompt, response, **columns)


def problems() -> list[dict[str, Any]]:
    """Returns the training problems, which are struck; held-out ones are not."""
    return [{**row, "struck": True} for row in task.problems()]


class FaultyCalculator(Calculator):
    """A calculator, except where the fault `kind` strikes (empty for none), in this share of the
    turns; `marks` is a folder that gets a file for each strike, before it."""

    def __init__(self, kind: str, share: float, marks: str) -> None:
        self.kind = kind
        self.share = share
        self.marks = marks
        self._prompt = ""

    def start(self, prompt: str, **columns: Any) -> None:
        self._prompt = prompt if columns.get("struck") else ""

    def reply(self, turn: str) -> Answer | Awaitable[Answer]:  # type: ignore[override]
        if not self.kind or not self._prompt or not is_struck(self.share, self._prompt, turn):
            return super().reply(turn)
        (Path(self.marks) / os.urandom(16).hex()).touch()
        return OF_ENVIRONMENTS[self.kind][1]()
