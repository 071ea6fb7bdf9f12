"""Where requests wait until dispatch sends them to a generator with room, and from where half-written responses move
on.

    enter -> wait for dispatch -> the places are taken -> leave -> enter again with what is unfinished

A pool has one, and so has its model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from lrl.routing.dispatch import Dispatch, Request
from lrl.routing.dispatch.base import has_room
from lrl.routing.migration import Migration, MigrationSource
from lrl.types import Rollout


class Slots:
    """Mixin: a generator's places for responses, which the desk takes and frees.

    Args:
        capacity: Responses it writes at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.in_flight = 0
        """Responses for rollouts that it writes or is about to."""
        self.load: dict[Request, Sequence[Rollout]] = {}
        """What takes its places: each request with its responses, of which some may have ended."""
        self._held: dict[Request, int] = {}
        self.passed_over = False
        """Whether requests wait that dispatch has not sent here."""

    def note_waiting(self, waiting: bool) -> None:
        """Requests wait that go nowhere yet, or none does."""
        self.passed_over = waiting

    def reserve(self, request: Request, rollouts: Sequence[Rollout]) -> None:
        """A place for each response of `request` is taken until that has ended, or until `free`."""
        self.in_flight += request.responses
        self.load[request], self._held[request] = rollouts, request.responses

    def release(self, request: Request) -> None:
        """One response of `request` has ended: its place is another's."""
        self.in_flight -= 1
        self._held[request] -= 1

    def free(self, request: Request) -> None:
        """The places that `request` still has are others'."""
        self.in_flight -= self._held.pop(request)
        del self.load[request]


class SlotHolder(MigrationSource, Protocol):
    """A generator as the desk sees it; it has `Slots`."""

    @property
    def serving(self) -> bool:
        """Whether it takes requests."""

    def reserve(self, request: Request, rollouts: Sequence[Rollout]) -> None:
        """A place for each response of `request` is taken until that has ended, or until `free`."""

    def release(self, request: Request) -> None:
        """One response of `request` has ended: its place is another's."""

    def free(self, request: Request) -> None:
        """The places that `request` still has are others'."""

    def note_waiting(self, waiting: bool) -> None:
        """Requests wait that go nowhere yet, or none does."""

    def interrupt(self, rollouts: Sequence[Rollout]) -> bool:
        """Stop writing `rollouts`, which keep what has come; whether any was being written."""


G = TypeVar("G", bound=SlotHolder)


class RequestQueue(Generic[G]):
    """Requests that wait, and the places of those that are written.

    Args:
        dispatch: Which generator answers which request, and in which order.
        serving: The generators that may be asked now.
    """

    def __init__(self, dispatch: Dispatch, serving: Callable[[], Sequence[G]]) -> None:
        self.dispatch = dispatch
        self.migration: Migration | None = None
        """Whether half-written responses move to idle generators; None for never."""
        self.moved = 0
        """Responses that did."""
        self._serving = serving
        self._waiting: dict[Request, tuple[Sequence[Rollout], asyncio.Future[G]]] = {}
        self._sending = False
        self.keeps = False
        """Whether requests waited when dispatch had last sent all that it would."""
        self._targets: dict[Request, G] = {}  # of what is being interrupted
        self._under: dict[Request, int] = {}  # the version under which a request moved to where it is

    async def enter(self, request: Request, rollouts: Sequence[Rollout], target: G | None = None) -> G:
        """Take the places of `request`, until `leave`.

        Args:
            request: What needs a generator.
            rollouts: Its responses.
            target: Where it moves to, if it does; it may have become busy since.

        Returns:
            `target`, or the generator that dispatch chooses, as soon as it does.
        """
        if target is not None and target.serving and has_room(target, request):
            self.dispatch.estimate(request)
            self._under[request] = target.version
            self.moved += request.responses
            target.reserve(request, rollouts)
            return target
        sent: asyncio.Future[G] = asyncio.get_running_loop().create_future()
        self._waiting[request] = rollouts, sent
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

    def release(self, generator: G, request: Request) -> None:
        """A response has ended. Its place does not wait for the longest one of its group: with long tails most
        would."""
        generator.release(request)
        if self._waiting:
            self.send_soon()

    def leave(self, generator: G, request: Request) -> G | None:
        """The places of `request` are others'; where its unfinished responses move to, if they were interrupted."""
        generator.free(request)
        self._under.pop(request, None)
        self.send_soon()
        asyncio.get_running_loop().call_soon(self._move)
        return self._targets.pop(request, None)

    def send_soon(self) -> None:
        """Send behind all that is ready to run now: dispatch then knows a step's requests before the first one goes.

        Call it when a generator has begun to serve.
        """
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        """Send all that dispatch lets go; what goes wrong in it is raised where the requests wait."""
        self._sending = False
        try:
            while self._waiting and (chosen := self.dispatch.send(serving := self._serving())) is not None:
                request, position = chosen
                rollouts, sent = self._waiting.pop(request)
                if not sent.cancelled():
                    serving[position].reserve(request, rollouts)
                    sent.set_result(serving[position])
        except Exception as error:
            for _, sent in self._waiting.values():
                if not sent.done():
                    sent.set_exception(error)
            self._waiting.clear()
        if self.keeps != bool(self._waiting):
            self.keeps = bool(self._waiting)
            for generator in self._serving():
                generator.note_waiting(self.keeps)

    def _move(self) -> None:
        """Let half-written responses go on with idle generators, when nothing waits; none twice under one version."""
        serving, lengths = self._serving(), self.dispatch.lengths
        if self.migration is None or lengths is None or self._waiting or self._targets:
            return
        version = max((generator.version for generator in serving), default=0)
        fixed = {request: under for request, under in self._under.items() if under == version}
        for request, source, target in list(self.migration.plan(serving, lengths, fixed)):
            if serving[source].interrupt(serving[source].load[request]):
                self._targets[request] = serving[target]
