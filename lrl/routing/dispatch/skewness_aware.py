"""Long responses on generators of their own: StreamRL's skewness-aware dispatching (2504.15930, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from lrl.routing.dispatch.base import Dispatch, Line, Loaded, Request, has_room, longest_first
from lrl.routing.dispatch.decode_latency import DecodeLatency
from lrl.runtime.config_errors import fault

LONG, REST = 0.9, 0.5
"""Quantiles of the recent lengths that stand for the long responses and for the rest."""


class SkewnessAware(Dispatch):
    """Divides the generators between the long requests and the rest; the longest first within each part.

    A generator with fewer responses writes each of them faster. So the longest requests get generators on which they
    are few, and the many short ones share the others. How many generators are for the long ones is chosen whenever
    requests of a new step come, from all that wait then: the number with the lowest latency of both parts together.

    Two things are not the paper's. An idle generator takes what waits for the other part, if its own has nothing of the
    step that the trainer waits for. And requests of a later step wait until none of an earlier one does.

    Args:
        long_tail: Share of the requests that counts as long, in (0, 1); the paper's is 0.2.
        combine: What is minimised: `max` is the time at which both parts are done, `sum` is what the paper prints.
        decode_latency: How long a generator takes for a token.

    Raises:
        ValueError: A setting is outside its range.
    """

    needs_lengths = True

    def __init__(
        self,
        long_tail: float = 0.2,
        combine: Literal["sum", "max"] = "max",
        decode_latency: DecodeLatency | None = None,
    ) -> None:
        super().__init__()
        if not 0 < long_tail < 1:
            fault(f"data.dispatch.long_tail is {long_tail}; it is a share of the requests, between 0 and 1.")
        if combine not in ("sum", "max"):
            fault(f"data.dispatch.combine is {combine!r}; it is sum or max.")
        self.long_tail = long_tail
        self.combine = combine
        self.decode_latency = decode_latency or DecodeLatency()
        self._long, self._rest = Line(), Line()
        self._shortest_long = math.inf  # tokens, at the last division
        self._long_generators = 0  # the first so many of the pool
        self._divided_for = (-1, 0)  # the newest step, and the number of generators
        self._newest_due = -1

    def order(self, request: Request) -> tuple[float, ...]:
        """See `Dispatch.order`."""
        return longest_first(request)

    def add(self, request: Request) -> None:
        """See `Dispatch.add`."""
        self.estimate(request)
        self._newest_due = max(self._newest_due, request.due)
        self._push(request, is_long=request.tokens > self._shortest_long)

    def _push(self, request: Request, is_long: bool) -> None:
        (self._long if is_long else self._rest).push(self.order(request), request)

    def discard(self, request: Request) -> None:
        """See `Dispatch.discard`."""
        self._long.discard(request)
        self._rest.discard(request)

    def send(self, generators: Sequence[Loaded]) -> tuple[Request, int] | None:
        """See `Dispatch.send`."""
        if generators and self._divided_for != (self._newest_due, len(generators)):
            self._divide(generators)
        waiting = [line for line in (self._long, self._rest) if line.first is not None]
        due = min((line.first.due for line in waiting if line.first), default=0)
        for line in waiting:
            head = line.first
            if head and head.due == due and (position := self.pick(head, generators)) is not None:
                line.discard(head)
                return head, position
        return None

    def pick(self, request: Request, generators: Sequence[Loaded]) -> int | None:
        """See `Dispatch.pick`."""
        is_long = request in self._long
        others = (self._rest if is_long else self._long).first
        helps = others is None or others.due != request.due

        def may_write(position: int) -> bool:
            own = (position < self._long_generators) == is_long or len(generators) == 1
            return own or (helps and generators[position].in_flight == 0)

        free = [position for position, generator in enumerate(generators) if has_room(generator, request)]
        free = [position for position in free if may_write(position)]
        return min(free, key=lambda position: generators[position].in_flight, default=None)

    def _divide(self, generators: Sequence[Loaded]) -> None:
        """Algorithm 2, for all that waits."""
        waiting = sorted([*self._long, *self._rest], key=lambda request: -request.tokens)
        if self.lengths is None or not waiting:
            return
        self._divided_for = self._newest_due, len(generators)
        cut = math.ceil(self.long_tail * len(waiting))
        self._shortest_long = waiting[cut - 1].tokens
        self._long, self._rest = Line(), Line()
        for place, request in enumerate(waiting):
            self._push(request, is_long=place < cut)
        self._long_generators = generators_for_the_long(
            (sum(request.responses for request in self._long), self.lengths.quantile(LONG)),
            (sum(request.responses for request in self._rest), self.lengths.quantile(REST)),
            len(generators),
            min(generator.capacity for generator in generators),
            self.decode_latency,
            self.combine,
        )


def generators_for_the_long(
    long: tuple[int, float],
    rest: tuple[int, float],
    generators: int,
    capacity: int,
    decode_latency: DecodeLatency,
    combine: Literal["sum", "max"],
) -> int:
    """N_l of algorithm 2: generators that write the long responses; the fewest, where several numbers are as good.

    Args:
        long: How many responses are long, and the tokens that stand for the length of one.
        rest: The same of the others.
        generators: N_l + N_r; at least 2, and each part gets one.
        capacity: Responses that a generator writes at once.
        decode_latency: The time for a token.
        combine: How the latencies of the two parts are combined.
    """

    def latency(part: tuple[int, float], share: int) -> float:
        responses, tokens = part
        return decode_latency.latency(math.ceil(responses / share), tokens, capacity)

    def total(share: int) -> float:
        parts = latency(long, share), latency(rest, generators - share)
        return sum(parts) if combine == "sum" else max(parts)

    return min(range(1, generators), key=total, default=0)
