"""Where time goes: the seconds in each of several states, of which exactly one holds at a time. So they add up."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAITS = ("wait_first", "wait_next", "wait_last", "wait_reward")
"""The trainer waits for a step's first group, for its last, for one between; or for the rewards of the one it needs."""
SYNC = ("stage", "transfer", "probe")
"""The trainer prepares weights, moves them while the generators stand still, and waits for the end and the proof of an
earlier sync, in the first one for its own."""
TRAINER = (*WAITS, "pack", "ranks", "reference", "train", *SYNC)
"""All that a trainer does, as rank 0 sees it. `ranks` is waiting, behind its own last micro-batch, until the others
have taken theirs; `train` is forward, backward and update, and the callbacks of others."""
GENERATOR = ("writing", "paused", "starved", "idle")
"""All that a generator does. With nothing to write it is starved when pacing lets nothing more start, and idle when
requests wait that dispatch does not send it; `paused` is for and within a sync."""


class Stopwatch:
    """Adds up seconds by state.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = ""
        """What holds now; nothing before the first."""
        self._clock = clock
        self._since = 0.0
        self._seconds = defaultdict[str, float](float)

    def enter(self, state: str) -> float:
        """`state` holds from now on; the seconds since the last call of `enter` or `lap`."""
        now = self._clock()
        seconds = now - self._since if self.state else 0.0
        if self.state:
            self._seconds[self.state] += seconds
        self.state, self._since = state, now
        return seconds

    @contextmanager
    def within(self, state: str) -> Iterator[None]:
        """Enter `state`, and afterwards what held before."""
        before = self.state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self, state: str) -> float:
        """The seconds in `state` since the last lap, up to the last call of `enter`."""
        return self._seconds.get(state, 0.0)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count `seconds` of one state as another's: their cause is known only now."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def lap(self) -> dict[str, float]:
        """The seconds by state since the last lap; the state goes on."""
        self.enter(self.state)
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


def shares(seconds: dict[str, float], states: tuple[str, ...]) -> dict[str, float]:
    """The share of each of `states` in all seconds, 0 where there are none."""
    total = sum(seconds.values())
    return {state: seconds.get(state, 0.0) / total if total else 0.0 for state in states}
