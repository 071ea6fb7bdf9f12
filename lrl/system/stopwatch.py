"""Time by state: the seconds in each of several exclusive states, which add up to the total."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

WAITS = ("wait_first", "wait_next", "wait_last", "wait_reward")
"""The trainer waits for a step's first group, its last, one between, or the next one's rewards."""
SYNC = ("stage", "transfer", "probe")
"""The trainer stages weights, transfers them while the generators are paused, and waits for the end
and the proof of an earlier sync."""
TRAINER = (*WAITS, "pack", "ranks", "reference", "train", *SYNC)
"""All states of a trainer, on rank 0. `ranks` is the wait, after its own last micro-batch, until
the other ranks have taken theirs; `train` is forward, backward and update, and the callbacks of
others."""
GENERATOR = ("writing", "paused", "starved")
"""All states of a generator. It is starved without a request, and paused for and within a sync."""


@dataclass(eq=False)
class Stopwatch:
    """Adds up seconds by state, on a monotonic clock."""

    clock: Callable[[], float] = time.monotonic
    state: str = field(default="", init=False)
    """The present state; empty before the first."""
    _since: float = field(default=0.0, init=False)
    _seconds: defaultdict[str, float] = field(
        default_factory=partial(defaultdict, float), init=False
    )

    def enter(self, state: str) -> float:
        """Begins `state`; returns the seconds since the last call of `enter` or `lap`."""
        before, self._since = self._since, self.clock()
        seconds = self._since - before if self.state else 0.0
        if self.state:
            self._seconds[self.state] += seconds
        self.state = state
        return seconds

    @contextmanager
    def within(self, state: str) -> Iterator[None]:
        """Enters `state` for the block, and the previous state after it."""
        before = self.state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self, state: str) -> float:
        """Returns the seconds in `state` since the last lap, up to the last call of `enter`."""
        return self._seconds.get(state, 0.0)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Moves `seconds` from one state to another, for a cause that is known only later."""
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def lap(self) -> dict[str, float]:
        """Returns and clears the seconds by state; the present state continues."""
        self.enter(self.state)
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


def shares(seconds: dict[str, float], states: tuple[str, ...]) -> dict[str, float]:
    """Returns the share of each of `states` in all seconds; 0 if there are none."""
    total = sum(seconds.values())
    return {state: seconds.get(state, 0.0) / total if total else 0.0 for state in states}
