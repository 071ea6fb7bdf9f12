"""Separate generators for long responses: StreamRL's skewness-aware dispatching (2504.15930,
algorithm 2)."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

from lrl.routing.dispatch.base import (
    DecodeLatency,
    DispatchPolicy,
    GeneratorLoad,
    PriorityQueue,
    Request,
    has_room,
    longest_first,
)
from lrl.system.config_errors import fault, one_of

LONG, REST = 0.9, 0.5
"""Quantiles of the recent lengths that stand for the long responses and for the rest."""

Combine = Literal["sum", "max"]


class SkewnessAware(DispatchPolicy):
    """Divides the generators between the long requests and the rest; the longest first within each
    part.

    A generator with fewer responses writes each of them faster. So the few longest requests get
    generators for themselves, and the many short ones share the others. The number of generators
    for the long ones is chosen whenever requests of a new step come, from all that wait then: the
    number with the lowest latency of both parts together.

    Two things are not the paper's. An idle generator takes a request of the other part, if its own
    part has none of the step that the trainer waits for. And requests of a later step wait until
    those of earlier steps are sent.

    Args:
        long_tail: Share of the requests that counts as long, in (0, 1); the paper's is 0.2.
        combine: The latency to minimise: `max` is the time at which both parts are done, `sum` is
            what the paper prints.
        decode_latency: A generator's time for a token.

    Raises:
        ValueError: A setting is outside its range.
    """

    needs_lengths = True

    def __init__(
        self,
        long_tail: float = 0.2,
        combine: Combine = "max",
        decode_latency: DecodeLatency | None = None,
    ) -> None:
        super().__init__()
        if not 0 < long_tail < 1:
            fault(
                f"data.dispatch.long_tail is {long_tail}; it is a share of the requests, between 0 "
                "and 1."
            )
        one_of("data.dispatch", combine=(get_args(Combine), combine))
        self.long_tail = long_tail
        self.combine = combine
        self.decode_latency = decode_latency or DecodeLatency()
        self._long = PriorityQueue()
        self._rest = PriorityQueue()
        self._shortest_long = math.inf  # tokens, at the last division
        self._long_generators = 0  # the first so many of the pool
        self._divided_for = (-1, 0)  # the newest step, and the number of generators
        self._newest_due = -1

    def order(self, request: Request) -> tuple[float, ...]:
        return longest_first(request)

    def add(self, request: Request) -> None:
        self.estimate(request)
        self._newest_due = max(self._newest_due, request.due)
        queue = self._long if request.tokens > self._shortest_long else self._rest
        queue.push(self.order(request), request)

    def discard(self, request: Request) -> None:
        self._long.discard(request)
        self._rest.discard(request)

    def send(self, generators: Sequence[GeneratorLoad]) -> tuple[Request, int] | None:
        if generators and self._divided_for != (self._newest_due, len(generators)):
            self._divide(generators)
        firsts = [first for queue in (self._long, self._rest) if (first := queue.first) is not None]
        due = min((request.due for request in firsts), default=0)
        for request in firsts:
            if request.due == due and (position := self.pick(request, generators)) is not None:
                self.discard(request)
                return request, position
        return None

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        is_long = request in self._long
        others = (self._rest if is_long else self._long).first
        helps = others is None or others.due != request.due

        def may_write(position: int, generator: GeneratorLoad) -> bool:
            own = (position < self._long_generators) == is_long or len(generators) == 1
            return (own or (helps and generator.in_flight == 0)) and has_room(generator, request)

        free = [
            position
            for position, generator in enumerate(generators)
            if may_write(position, generator)
        ]
        return min(free, key=lambda position: generators[position].in_flight, default=None)

    def _divide(self, generators: Sequence[GeneratorLoad]) -> None:
        """Runs algorithm 2 over all requests that wait."""
        waiting = sorted([*self._long, *self._rest], key=lambda request: -request.tokens)
        if self.lengths is None or not waiting:
            return
        self._divided_for = self._newest_due, len(generators)
        cut = math.ceil(self.long_tail * len(waiting))
        self._shortest_long = waiting[cut - 1].tokens
        self._long = PriorityQueue()
        self._rest = PriorityQueue()
        for index, request in enumerate(waiting):
            (self._long if index < cut else self._rest).push(self.order(request), request)
        self._long_generators = generators_for_the_long(
            (sum(request.responses for request in self._long), self.lengths.quantile(LONG)),
            (sum(request.responses for request in self._rest), self.lengths.quantile(REST)),
            generators=len(generators),
            capacity=min(generator.capacity for generator in generators),
            decode_latency=self.decode_latency,
            combine=self.combine,
        )


def generators_for_the_long(
    long: tuple[int, float],
    rest: tuple[int, float],
    generators: int,
    capacity: int,
    decode_latency: DecodeLatency,
    combine: Combine,
) -> int:
    """Returns N_l of algorithm 2, the generators that write the long responses; the fewest among
    equally good numbers.

    Args:
        long: Number of the long responses, and the tokens that stand for the length of one.
        rest: The same of the others.
        generators: N_l + N_r; at least 2, and each part gets one.
        capacity: Responses that a generator writes at once.
    """

    def latency(part: tuple[int, float], share: int) -> float:
        responses, tokens = part
        return decode_latency.latency(math.ceil(responses / share), tokens, capacity)

    def total(share: int) -> float:
        parts = latency(long, share), latency(rest, generators - share)
        return sum(parts) if combine == "sum" else max(parts)

    return min(range(1, generators), key=total, default=0)
