"""The quickstart's reward with a fault that strikes a share of the responses, the same ones in
every run.

Reward workers import this module when they start, and hundreds of them are replaced: it imports
nothing heavy.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lrl.quickstart.task import correct
from lrl.rewards import Reward

_hoard: list[bytes] = []


def _raise() -> Any:
    raise LookupError("a fault on purpose")


def _segfault() -> Any:
    return ctypes.string_at(0)


def _loop() -> Any:
    while True:
        pass


def _hog() -> Any:
    while True:
        _hoard.append(bytes(2**26))


FAULTS: dict[str, Callable[[], Any]] = {
    "exception": _raise,
    "crash": _segfault,
    "timeout": _loop,
    "memory": _hog,
    "nan": lambda: float("nan"),
    "wrong_type": lambda: "1.0",
    "wrong_shape": lambda: [1.0],
}
"""By the kind that the pool counts them as."""


class Faulty(Reward):
    """`correct`, except where the fault strikes.

    Args:
        kind: Of the fault, from `FAULTS`; empty for none.
        share: Of the responses, 0 to 1.
        seed: Decides which responses.
        marks: Folder with a file for each response that was struck: these are not struck again;
            empty: all always are.
    """

    def __init__(self, kind: str, share: float, seed: int, marks: str = "") -> None:
        super().__init__(name="correct")
        self.kind = kind
        self.share = share
        self.seed = seed
        self.marks = marks

    def digest(self, prompt: str, response: str) -> str:
        return hashlib.sha256(repr((self.seed, prompt, response)).encode()).hexdigest()

    def strikes(self, prompt: str, response: str) -> bool:
        return bool(self.kind) and int(self.digest(prompt, response)[:8], 16) < self.share * 2**32

    def __call__(self, prompt: str, response: str, **columns: Any) -> Any:
        if self.strikes(prompt, response) and self._is_due(prompt, response):
            return FAULTS[self.kind]()
        return correct(prompt, response, **columns)

    def _is_due(self, prompt: str, response: str) -> bool:
        if not self.marks:
            return True
        try:
            (Path(self.marks) / self.digest(prompt, response)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
