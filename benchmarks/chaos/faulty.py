"""The quickstart's reward with a fault that strikes some responses: the same ones in every run.

Workers import this module when they start, and hundreds of them are replaced: it imports nothing
heavy.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from typing import Any

from lrl.quickstart import task
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


FAULTS: dict[str, Callable[[], Any]] = {
    "exception": _raise,
    "crash": lambda: ctypes.string_at(0),
    "timeout": _loop,
    "memory": _hog,
    "nan": lambda: float("nan"),
    "wrong_type": lambda: "1.0",
    "wrong_shape": lambda: [1.0],
}
"""By the kind as which lrl has to count it."""


class FaultyReward(Reward):
    """`correct`, except where the fault strikes, empty for none: in a share of the responses, 0 to
    1, which the seed decides."""

    def __init__(self, fault: str, share: float, seed: int) -> None:
        super().__init__(name="correct")
        self.fault = fault
        self.share = share
        self.seed = seed

    def strikes(self, prompt: str, response: str) -> bool:
        digest = hashlib.sha256(repr((self.seed, prompt, response)).encode()).hexdigest()
        return bool(self.fault) and int(digest[:8], 16) < self.share * 2**32

    def __call__(self, prompt: str, response: str, **columns: Any) -> Any:
        if self.strikes(prompt, response):
            return FAULTS[self.fault]()
        return task.correct(prompt, response, **columns)
