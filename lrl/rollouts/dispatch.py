"""Which generator answers which prompt. One class a rule; a rule sees only what it may know: how loaded each one is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol


class Loaded(Protocol):
    """What a rule may know of a generator."""

    @property
    def in_flight(self) -> int:
        """Answers it is writing now."""

    @property
    def capacity(self) -> int:
        """Answers it can write at once."""


class Dispatch(ABC):
    """Picks the generator for the next group."""

    @abstractmethod
    def pick(self, generators: Sequence[Loaded], answers: int) -> int | None:
        """The position in `generators` of the one that writes `answers` more, or None to wait until one is free."""


class LeastLoaded(Dispatch):
    """The generator with the fewest answers in flight, if it has room.

    A request never waits inside vLLM: one that began to wait there before a sync would start on the keys and values of
    the version before. A group larger than a generator's whole capacity is sent to an idle one.
    """

    def pick(self, generators: Sequence[Loaded], answers: int) -> int | None:
        """See `Dispatch.pick`."""
        if not generators:
            return None
        best = min(range(len(generators)), key=lambda i: generators[i].in_flight)
        has_room = generators[best].in_flight + answers <= generators[best].capacity
        return best if has_room or generators[best].in_flight == 0 else None
