"""Stretches of a generator's work, from looks at it a few times a second.

    look, look, look, ...  ->  a stretch without a break  ->  GeneratorRecord

A stretch ends after a second, or at the last look before a break: what is idle or paused is in none.
"""

from __future__ import annotations

from collections.abc import Callable

from lrl.generators.stats import StatsSnapshot
from lrl.planning.profiling.timeline import GeneratorRecord

LOOK_S = 0.1
"""Between two looks."""
STRETCH_S = 1.0
SHORTEST_S = 0.25
"""A shorter stretch is not recorded: tokens arrive in chunks, and whether one more has come would be most of it."""


class Stretches:
    """The stretches of one generator.

    Args:
        record: Told of each that has ended.
    """

    def __init__(self, record: Callable[[GeneratorRecord], None]) -> None:
        self._record = record
        self._first: tuple[float, StatsSnapshot] | None = None  # when the stretch began, and how it was then
        self._last = (0.0, StatsSnapshot(None, 0.0, 0, 0, 0))
        self._response_s = self._context_s = 0.0  # integrals over the stretch

    def look(self, now: float, seen: StatsSnapshot) -> None:
        """How it is now."""
        if self._first is None or seen.since is None or seen.since > self._first[0]:
            self._end()
            self._first = None if seen.since is None else (now, seen)
        else:
            self._add(now, seen)
        self._last = (now, seen)
        if self._first is not None and now - self._first[0] >= STRETCH_S:
            self._end()
            self._first = (now, seen)

    def _add(self, now: float, seen: StatsSnapshot) -> None:
        """The trapezoidal rule between two looks."""
        before, then = self._last
        self._response_s += (now - before) * (then.responses + seen.responses) / 2
        self._context_s += (now - before) * (then.context_tokens + seen.context_tokens) / 2

    def _end(self) -> None:
        """Record the stretch up to the last look."""
        response_s, context_s = self._response_s, self._context_s
        self._response_s = self._context_s = 0.0
        if self._first is None or (seconds := self._last[0] - self._first[0]) < SHORTEST_S:
            return
        first, last = self._first[1], self._last[1]
        self._record(
            GeneratorRecord(
                seconds=seconds,
                tokens=max(0, round(last.written - first.written)),
                responses=response_s / seconds,
                context_tokens=context_s / seconds,
                prefill_tokens=last.read - first.read,
            )
        )
