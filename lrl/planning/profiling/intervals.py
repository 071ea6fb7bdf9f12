"""Intervals of a generator's work, from snapshots taken a few times a second.

    snapshot, snapshot, ...  ->  an interval without a break  ->  GeneratorRecord

A generator sends the tokens of a second together, so an interval ends where they have just come: at
the first such snapshot after a second, or at the last one before a break. Idle time and pauses are
in no interval, and no interval is without new tokens.
"""

from collections.abc import Callable

from lrl.generators.stats import StatsSnapshot
from lrl.planning.profiling.timeline import GeneratorRecord

SAMPLE_S = 0.1
"""Seconds between two snapshots."""
INTERVAL_S = 1.0
SHORTEST_S = 0.25
"""Shorter intervals are dropped: a token of each response more or less would be much of the
interval."""


class WorkIntervals:
    """Intervals of one generator's work; calls `record` with each complete one."""

    def __init__(self, record: Callable[[GeneratorRecord], None]) -> None:
        self._record = record
        self._first: tuple[float, StatsSnapshot] | None = None  # of the interval: (time, snapshot)
        self._last = (
            0.0,
            StatsSnapshot(None, 0, up_to_date=False, read=0, responses=0, context_tokens=0),
        )
        self._response_s = self._context_s = 0.0  # integrals over the interval
        self._so_far: GeneratorRecord | None = None  # up to the last snapshot that was up to date

    def add(self, now: float, seen: StatsSnapshot) -> None:
        """Adds the snapshot taken at `now`."""
        if self._first is None or seen.since is None or seen.since > self._first[0]:
            self._end()
            self._first = None if seen.since is None else (now, seen)
        else:  # trapezoidal rule between two snapshots
            before, then = self._last
            self._response_s += (now - before) * (then.responses + seen.responses) / 2
            self._context_s += (now - before) * (then.context_tokens + seen.context_tokens) / 2
            if seen.up_to_date:
                self._note(now, *self._first, seen)
        self._last = (now, seen)
        if self._so_far is not None and self._so_far.seconds >= INTERVAL_S:
            self._end()
            self._first = (now, seen)

    def _note(self, now: float, began: float, first: StatsSnapshot, seen: StatsSnapshot) -> None:
        seconds = now - began
        self._so_far = GeneratorRecord(
            seconds=seconds,
            tokens=seen.written - first.written,
            responses=self._response_s / seconds,
            context_tokens=self._context_s / seconds,
            prefill_tokens=seen.read - first.read,
        )

    def _end(self) -> None:
        """Records the interval, unless it is too short or no token came in it."""
        if (
            self._so_far is not None
            and self._so_far.seconds >= SHORTEST_S
            and self._so_far.tokens > 0
        ):
            self._record(self._so_far)
        self._so_far = None
        self._response_s = 0.0
        self._context_s = 0.0
