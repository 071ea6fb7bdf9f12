"""Intervals of a generator's work, from snapshots taken a few times a second.

    snapshot, snapshot, ...  ->  an interval without a break  ->  GeneratorRecord

An interval ends at the first new token after a second, or at the last snapshot before a break. Idle time and pauses
are in no interval, and no interval is without new tokens.
"""

from collections.abc import Callable

from lrl.generators.stats import StatsSnapshot
from lrl.planning.profiling.timeline import GeneratorRecord

SAMPLE_S = 0.1
"""Seconds between two snapshots."""
INTERVAL_S = 1.0
SHORTEST_S = 0.25
"""Shorter intervals are dropped: tokens arrive in chunks, and one chunk more or less would be most of the interval."""


class WorkIntervals:
    """Intervals of one generator's work; calls `record` with each complete one."""

    def __init__(self, record: Callable[[GeneratorRecord], None]) -> None:
        self._record = record
        self._first: tuple[float, StatsSnapshot] | None = None  # of the interval: (time, snapshot)
        self._last = (0.0, StatsSnapshot(None, 0, 0, 0, 0))
        self._response_s = self._context_s = 0.0  # integrals over the interval

    def add(self, now: float, seen: StatsSnapshot) -> None:
        """Adds the snapshot taken at `now`."""
        if self._first is None or seen.since is None or seen.since > self._first[0]:
            self._end()
            self._first = None if seen.since is None else (now, seen)
        else:  # trapezoidal rule between two snapshots
            before, then = self._last
            self._response_s += (now - before) * (then.responses + seen.responses) / 2
            self._context_s += (now - before) * (then.context_tokens + seen.context_tokens) / 2
        self._last = (now, seen)
        if self._first is not None and now - self._first[0] >= INTERVAL_S and seen.written > self._first[1].written:
            self._end()
            self._first = (now, seen)

    def _end(self) -> None:
        """Records the interval up to the last snapshot, unless it is too short or no token arrived in it."""
        response_s, context_s = self._response_s, self._context_s
        self._response_s = self._context_s = 0.0
        if self._first is None or (seconds := self._last[0] - self._first[0]) < SHORTEST_S:
            return
        first, last = self._first[1], self._last[1]
        # Work that is not heard of yet: the tokens come with the break itself, or at another generator.
        if last.written == first.written:
            return
        self._record(
            GeneratorRecord(
                seconds=seconds,
                tokens=max(0, last.written - first.written),
                responses=response_s / seconds,
                context_tokens=context_s / seconds,
                prefill_tokens=last.read - first.read,
            )
        )
