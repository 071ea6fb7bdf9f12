"""The fewest tokens."""

from __future__ import annotations

from collections.abc import Sequence

from lrl.routing.dispatch.base import Dispatch, Loaded, Request, has_room, longest_first


class LeastTokens(Dispatch):
    """Of the generators with room, the one whose responses still need the fewest tokens; the longest request first.

    The longest goes first among those of one step: a step is over with its last response, so what takes longest must
    not start last (Graham 1969: within 4/3 of the best schedule, if the lengths are known).
    """

    needs_lengths = True

    def order(self, request: Request) -> tuple[float, ...]:
        """See `Dispatch.order`."""
        return longest_first(request)

    def pick(self, request: Request, generators: Sequence[Loaded]) -> int | None:
        """See `Dispatch.pick`."""
        return fewest_tokens(request, generators)


def fewest_tokens(request: Request, generators: Sequence[Loaded]) -> int | None:
    """The position of the generator with room whose responses still need the fewest tokens, or None."""
    free = [position for position, generator in enumerate(generators) if has_room(generator, request)]
    return min(free, key=lambda position: generators[position].outstanding_tokens, default=None)
