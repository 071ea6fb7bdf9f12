"""Dispatch policies that choose for one request at a time, by the load of the generators at that
moment."""

from collections.abc import Sequence

from lrl.routing.dispatch.base import (
    DispatchPolicy,
    GeneratorLoad,
    Request,
    has_room,
    longest_first,
)


class LeastLoaded(DispatchPolicy):
    """The generator with the fewest responses in flight, if it has room; the oldest group first."""

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        best = min(range(len(generators)), key=lambda position: generators[position].in_flight)
        return best if has_room(generators[best], request) else None


class RoundRobin(DispatchPolicy):
    """The generators with room in turn; the oldest group first. A baseline without lengths."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        for turn in range(self._turn, self._turn + len(generators)):
            position = turn % len(generators)
            if has_room(generators[position], request):
                self._turn = position + 1
                return position
        return None


class LeastTokens(DispatchPolicy):
    """Of the generators with room, the one whose responses still need the fewest tokens; the
    longest request first.

    The longest goes first within a step: a step ends with its last response, so the longest must
    not start last (Graham 1969: within 4/3 of the best schedule, if the lengths are known).
    """

    needs_lengths = True

    def order(self, request: Request) -> tuple[float, ...]:
        return longest_first(request)

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        free = [
            position
            for position, generator in enumerate(generators)
            if has_room(generator, request)
        ]
        return min(free, key=lambda position: generators[position].outstanding_tokens, default=None)
