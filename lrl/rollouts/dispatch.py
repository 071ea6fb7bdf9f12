"""Which generator answers which prompt, and in which order. One class a rule.

A rule sees only what it may know: what waits, and how loaded each generator is. What waits is kept in the rule's order,
so sending one costs the same however many others wait.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lrl.data import Prompt


class Loaded(Protocol):
    """What a rule may know of a generator."""

    @property
    def in_flight(self) -> int:
        """Answers it is writing now."""

    @property
    def capacity(self) -> int:
        """Answers it can write at once."""


@dataclass(eq=False, slots=True)
class Request:
    """The unfinished answers to one prompt, which wait for a generator."""

    prompt: Prompt
    answers: int
    """How many; they go to one generator."""
    priority: int
    """The group's place in the run: lower is what the trainer waits for first."""


class Dispatch(ABC):
    """The requests that wait, and the rule by which they are sent.

    The first in the rule's order goes first, and holds the others until it has a generator: a large group would
    otherwise wait for ever while small ones fill every gap.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[float, ...], int, Request]] = []  # a heap
        self._gone: set[Request] = set()  # discarded, and still in the heap
        self._arrivals = 0

    @abstractmethod
    def order(self, request: Request) -> tuple[float, ...]:
        """Sorts what waits: the smallest goes first, and among equals the first that came."""

    @abstractmethod
    def pick(self, request: Request, generators: Sequence[Loaded]) -> int | None:
        """The position in `generators` of the one that writes `request`, or None to wait until one is free."""

    def add(self, request: Request) -> None:
        """`request` waits from now on."""
        self._arrivals += 1
        heapq.heappush(self._waiting, (self.order(request), self._arrivals, request))

    def discard(self, request: Request) -> None:
        """`request` waits no longer."""
        self._gone.add(request)

    def send(self, generators: Sequence[Loaded]) -> tuple[Request, int] | None:
        """The request that goes out now, which waits no longer, and its generator's position; None if all wait."""
        while self._waiting and self._waiting[0][2] in self._gone:
            self._gone.remove(heapq.heappop(self._waiting)[2])
        if not self._waiting or not generators:
            return None
        request = self._waiting[0][2]
        position = self.pick(request, generators)
        if position is None:
            return None
        heapq.heappop(self._waiting)
        return request, position


class LeastLoaded(Dispatch):
    """The generator with the fewest answers in flight, if it has room; the oldest group first.

    A request never waits inside vLLM: one that began to wait there before a sync would start on the keys and values of
    the version before. A group larger than a generator's whole capacity is sent to an idle one.
    """

    def order(self, request: Request) -> tuple[float, ...]:
        """See `Dispatch.order`."""
        return (request.priority,)

    def pick(self, request: Request, generators: Sequence[Loaded]) -> int | None:
        """See `Dispatch.pick`."""
        best = min(range(len(generators)), key=lambda i: generators[i].in_flight)
        has_room = generators[best].in_flight + request.answers <= generators[best].capacity
        return best if has_room or generators[best].in_flight == 0 else None
