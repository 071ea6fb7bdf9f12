"""Long responses in rounds of their own."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from lrl.routing.dispatch.base import Dispatch, Line, Loaded, Request, longest_first
from lrl.routing.dispatch.least_tokens import fewest_tokens
from lrl.runtime.config_errors import at_least, fault

RECENT = 512
"""Requests among which one is long or not."""


class TailBatching(Dispatch):
    """Holds the requests that are expected to be long back, and sends them together, those of several steps at once.

    What is held goes out when it fills a generator, when the step that trains one of it is near, and when a generator
    has nothing else to do. So nothing is held while all generators are idle, and a bound on lag of 0 holds nothing. How
    old a token may become is pacing's: this rule only decides when within that time a response begins.

    Args:
        long_tail: Share of the requests that counts as long, in (0, 1).
        steps_ahead: Steps before the one that trains it at which a request is held no longer. The generators' version
            stands for the trainer's step: give at least `WeightSync.every_n_steps` less one.

    Raises:
        ValueError: A setting is outside its range.
    """

    needs_lengths = True

    def __init__(self, long_tail: float = 0.2, steps_ahead: int = 1) -> None:
        super().__init__()
        if not 0 < long_tail < 1:
            fault(f"data.dispatch.long_tail is {long_tail}; it is a share of the requests, between 0 and 1.")
        at_least(0, "data.dispatch", steps_ahead=steps_ahead)
        self.long_tail = long_tail
        self.steps_ahead = steps_ahead
        self._held = Line()
        self._recent = deque[float](maxlen=RECENT)
        self._ranked: list[float] = []  # the same, sorted

    def order(self, request: Request) -> tuple[float, ...]:
        """See `Dispatch.order`."""
        return longest_first(request)

    def pick(self, request: Request, generators: Sequence[Loaded]) -> int | None:
        """See `Dispatch.pick`."""
        return fewest_tokens(request, generators)

    def add(self, request: Request) -> None:
        """See `Dispatch.add`."""
        self.estimate(request)
        line = self._held if self._is_long(request.tokens) else self._line
        line.push(self.order(request), request)

    def discard(self, request: Request) -> None:
        """See `Dispatch.discard`."""
        self._held.discard(request)
        super().discard(request)

    def send(self, generators: Sequence[Loaded]) -> tuple[Request, int] | None:
        """See `Dispatch.send`."""
        if generators and self._a_round_is_due(generators):
            for request in self._held:
                self._line.push(self.order(request), request)
            self._held = Line()
        return super().send(generators)

    def _a_round_is_due(self, generators: Sequence[Loaded]) -> bool:
        first = self._held.first
        if first is None:
            return False
        version = max(generator.version for generator in generators)
        return (
            first.due <= version + self.steps_ahead
            or sum(request.responses for request in self._held) >= max(generator.capacity for generator in generators)
            or (not self._line and any(generator.in_flight == 0 for generator in generators))
        )

    def _is_long(self, tokens: float) -> bool:
        """Whether fewer than `long_tail` of the recent requests are as long; counts this one among them."""
        if len(self._recent) == RECENT:
            del self._ranked[bisect_left(self._ranked, self._recent[0])]
        self._recent.append(tokens)
        shorter = bisect_left(self._ranked, tokens)
        insort(self._ranked, tokens)
        return shorter >= (1 - self.long_tail) * len(self._ranked)
