"""An asyncio loop that never waits: when nothing is ready, its clock jumps to the next timer. Hours
of a run take milliseconds and are deterministic."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: every task waits for another."""


class _Jump(selectors.DefaultSelector):
    """A selector that moves `now` to asyncio's next timer instead of sleeping."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise Deadlock("Nothing is ready and no timer is set.")
        self.now += 0.0 if ready else max(0.0, timeout or 0.0)
        return ready


class VirtualClock(asyncio.SelectorEventLoop):
    """The loop; its time is in seconds from 0."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` to its end on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        return runner.run(work)
