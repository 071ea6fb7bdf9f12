"""Each in its turn."""

from __future__ import annotations

from collections.abc import Sequence

from lrl.routing.dispatch.base import Dispatch, Loaded, Request, has_room


class RoundRobin(Dispatch):
    """The generators in turn, those without room left out; the oldest group first. It knows no lengths: a baseline."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def order(self, request: Request) -> tuple[float, ...]:
        """See `Dispatch.order`."""
        return (request.priority,)

    def pick(self, request: Request, generators: Sequence[Loaded]) -> int | None:
        """See `Dispatch.pick`."""
        for turn in range(self._turn, self._turn + len(generators)):
            position = turn % len(generators)
            if has_room(generators[position], request):
                self._turn = position + 1
                return position
        return None
