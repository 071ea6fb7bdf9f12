"""The fewest responses."""

from __future__ import annotations

from collections.abc import Sequence

from lrl.routing.dispatch.base import Dispatch, Loaded, Request, has_room


class LeastLoaded(Dispatch):
    """The generator with the fewest responses in flight, if it has room; the oldest group first."""

    def order(self, request: Request) -> tuple[float, ...]:
        """See `Dispatch.order`."""
        return (request.priority,)

    def pick(self, request: Request, generators: Sequence[Loaded]) -> int | None:
        """See `Dispatch.pick`."""
        best = min(range(len(generators)), key=lambda position: generators[position].in_flight)
        return best if has_room(generators[best], request) else None
