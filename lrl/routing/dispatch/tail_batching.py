"""Separate rounds for long responses."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from lrl.routing.dispatch.base import GeneratorLoad, PriorityQueue, Request
from lrl.routing.dispatch.greedy import LeastTokens
from lrl.system.config_errors import at_least, fault

COMPARED_REQUESTS = 512
"""Number of recent requests with which a request is compared to count as long."""


class TailBatching(LeastTokens):
    """Batches of long requests: held back over several steps, then sent together as `LeastTokens`
    does.

    Held requests go out when they fill a generator, when the step that trains one of them is near,
    and when a generator has nothing else to do. So nothing is held while all generators are idle,
    and a bound on lag of 0 holds nothing. Pacing bounds the age of a token: this policy only
    decides when within that bound a response begins.

    Args:
        long_tail: Share of the requests that counts as long, in (0, 1).
        steps_ahead: Steps before the one that trains it at which a request is held no longer. The
            generators' version stands for the trainer's step: give at least
            `WeightSync.every_n_steps` less one.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(self, long_tail: float = 0.2, steps_ahead: int = 1) -> None:
        super().__init__()
        if not 0 < long_tail < 1:
            fault(
                f"data.dispatch.long_tail is {long_tail}; it is a share of the requests, between 0 "
                "and 1."
            )
        at_least(0, "data.dispatch", steps_ahead=steps_ahead)
        self.long_tail = long_tail
        self.steps_ahead = steps_ahead
        self._deferred = PriorityQueue()
        self._recent = deque[float](maxlen=COMPARED_REQUESTS)
        self._ranked: list[float] = []  # the same, sorted

    def add(self, request: Request) -> None:
        self.estimate(request)
        queue = self._deferred if self._is_long(request.tokens) else self._queue
        queue.push(self.order(request), request)

    def discard(self, request: Request) -> None:
        self._deferred.discard(request)
        super().discard(request)

    def send(self, generators: Sequence[GeneratorLoad]) -> tuple[Request, int] | None:
        if generators and self._round_is_due(generators):
            for request in self._deferred:
                self._queue.push(self.order(request), request)
            self._deferred = PriorityQueue()
        return super().send(generators)

    def _round_is_due(self, generators: Sequence[GeneratorLoad]) -> bool:
        first = self._deferred.first
        if first is None:
            return False
        version = max(generator.version for generator in generators)
        return (
            first.due <= version + self.steps_ahead
            or sum(request.responses for request in self._deferred)
            >= max(generator.capacity for generator in generators)
            or (not self._queue and any(generator.in_flight == 0 for generator in generators))
        )

    def _is_long(self, tokens: float) -> bool:
        """Returns whether fewer than `long_tail` of the recent requests, this one included, are as
        long."""
        if len(self._recent) == COMPARED_REQUESTS:
            del self._ranked[bisect_left(self._ranked, self._recent[0])]
        self._recent.append(tokens)
        shorter = bisect_left(self._ranked, tokens)
        insort(self._ranked, tokens)
        return shorter >= (1 - self.long_tail) * len(self._ranked)
