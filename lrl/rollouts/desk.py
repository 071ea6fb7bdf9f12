"""Where requests wait until dispatch sends them to a generator with room. The crew has one, and so has its model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from lrl.rollouts.dispatch import Dispatch, Loaded, Request


class Counted(Loaded, Protocol):
    """A generator whose answers in flight are counted here."""

    in_flight: int


G = TypeVar("G", bound=Counted)


class Desk(Generic[G]):
    """Requests that wait, and the answers that each generator is writing.

    Args:
        dispatch: Which generator answers which request, and in which order.
        serving: The generators that may be asked now.
    """

    def __init__(self, dispatch: Dispatch, serving: Callable[[], Sequence[G]]) -> None:
        self.dispatch = dispatch
        self._serving = serving
        self._sent: dict[Request, asyncio.Future[G]] = {}

    async def enter(self, request: Request) -> G:
        """Wait for the generator that dispatch chooses; the request's places in it are taken until `leave`."""
        sent = self._sent[request] = asyncio.get_running_loop().create_future()
        self.dispatch.add(request)
        self.send()
        try:
            return await sent
        except asyncio.CancelledError:
            if request in self._sent:
                del self._sent[request]
                self.dispatch.discard(request)
            elif not sent.cancelled():  # it was sent and cancelled in the same turn of the loop
                self.leave(sent.result(), request.answers)
            raise

    def leave(self, generator: G, answers: int) -> None:
        """These answers are no longer written there: others may have their places."""
        generator.in_flight -= answers
        self.send()

    def send(self) -> None:
        """Send all that dispatch lets go; call it when a generator has begun to serve."""
        while (chosen := self.dispatch.send(serving := self._serving())) is not None:
            request, position = chosen
            sent = self._sent.pop(request)
            if not sent.cancelled():
                serving[position].in_flight += request.answers
                sent.set_result(serving[position])
