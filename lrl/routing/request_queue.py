"""The queue of requests that wait for a generator.

    enter -> wait for dispatch -> slots are reserved -> leave -> enter again with what is unfinished

Each pool has a queue, and so has the simulator's model of a fleet.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lrl.routing.dispatch import DispatchPolicy, GeneratorLoad, Request, has_room
from lrl.routing.migration import Migration

G = TypeVar("G", bound=GeneratorLoad)


@dataclass(eq=False)
class RequestQueue(Generic[G]):
    """Requests that wait for a generator, in the order of a dispatch policy."""

    dispatch: DispatchPolicy
    serving: Callable[[], Sequence[G]]
    """Returns the generators that serve now."""
    migration: Migration | None = None
    moved: int = field(default=0, init=False)
    """Responses that moved."""
    _waiting: dict[Request, asyncio.Future[G]] = field(default_factory=dict, init=False)
    _sending: bool = field(default=False, init=False)
    _targets: dict[Request, G] = field(default_factory=dict, init=False)
    """New generators of interrupted requests."""

    async def enter(self, request: Request, target: G | None = None) -> G:
        """Waits for a generator and reserves its slots, until `leave`.

        Returns `target`, the generator to which a request moves, if it still has room; else the
        generator that dispatch chooses.
        """
        if target is not None and target.serving and has_room(target, request):
            self.dispatch.estimate(request)
            request.moved_at = target.version
            self.moved += request.responses
            target.reserve(request)
            return target
        sent: asyncio.Future[G] = asyncio.get_running_loop().create_future()
        self._waiting[request] = sent
        self.dispatch.add(request)
        self.send_soon()
        try:
            return await sent
        except asyncio.CancelledError:
            if request in self._waiting:
                del self._waiting[request]
                self.dispatch.discard(request)
            elif not sent.cancelled():  # it was sent and cancelled in the same turn of the loop
                self.leave(sent.result(), request)
            raise

    def release(self, generator: G) -> None:
        """Frees the slot of a response that has ended."""
        # The slot does not wait for the longest response of its group: with long tails most slots
        # would.
        generator.release()
        if self._waiting:
            self.send_soon()

    def leave(self, generator: G, request: Request) -> G | None:
        """Frees the slots of `request`; returns its new generator if it was interrupted to move."""
        generator.free(request)
        self.send_soon()
        asyncio.get_running_loop().call_soon(self._migrate)
        return self._targets.pop(request, None)

    def send_soon(self) -> None:
        """Sends requests in the next turn of the loop. Call it when a generator has begun to
        serve."""
        # Later, so that dispatch knows all requests of a step before it sends the first one.
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Sends all requests that dispatch lets go; raises an error of the policy where the
        requests wait."""
        self._sending = False
        try:
            while self._waiting:
                serving = self.serving()
                if (chosen := self.dispatch.send(serving)) is None:
                    break
                request, position = chosen
                sent = self._waiting.pop(request)
                if not sent.cancelled():
                    serving[position].reserve(request)
                    sent.set_result(serving[position])
        except Exception as error:
            for sent in self._waiting.values():
                if not sent.done():
                    sent.set_exception(error)
            self._waiting.clear()

    def _migrate(self) -> None:
        """Interrupts half-written requests that gain from an idle generator; none twice under one
        version."""
        serving, lengths = self.serving(), self.dispatch.lengths
        if self.migration is None or lengths is None or self._waiting or self._targets:
            return
        for request, source, target in list(self.migration.plan(serving, lengths)):
            if serving[source].interrupt(request):
                self._targets[request] = serving[target]
