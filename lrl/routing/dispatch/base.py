"""What every rule of dispatch shares: requests, the line in which they wait, and what may be known of a generator."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lrl.types import Prompt


class Loaded(Protocol):
    """What a rule may know of a generator."""

    @property
    def in_flight(self) -> int:
        """Responses it is writing now."""

    @property
    def capacity(self) -> int:
        """Responses it can write at once."""

    @property
    def outstanding_tokens(self) -> float:
        """Expected tokens that the responses in flight still need, at least one each."""

    @property
    def version(self) -> int:
        """Policy version it holds."""


class ExpectedLengths(Protocol):
    """Expected lengths of responses that are not written yet: `lrl.routing.length_predictor.LengthPredictor`, or an
    oracle."""

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Expected tokens of a whole response of which `written` are there; more than `written`."""

    def quantile(self, share: float) -> float:
        """The length, in tokens, that this share of the responses seen lately does not exceed."""


@dataclass(eq=False, slots=True)
class Request:
    """The unfinished responses to one prompt, which wait for a generator."""

    prompt: Prompt
    responses: int
    """How many; they go to one generator."""
    priority: int
    """The group's place in the run."""
    due: int = 0
    """The step that trains it (`Group.due`): the trainer waits for the smallest first."""
    written: float = 0.0
    """Tokens that each of the responses has already, on the average."""
    tokens: float = 1.0
    """Expected tokens that each of them still needs. `Dispatch.add` sets it; 1 where nothing is known."""


class Line:
    """Requests in order: the smallest first, and among equals the first that came.

    Sending one costs the same however many others wait, but for the heap's logarithm.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []
        self._waiting: dict[Request, None] = {}  # a set in order of arrival; who has left is in the heap for a while
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def push(self, order: tuple[float, ...], request: Request) -> None:
        """`request` waits from now on."""
        self._arrivals += 1
        self._waiting[request] = None
        heapq.heappush(self._heap, (order, self._arrivals, request))

    def discard(self, request: Request) -> None:
        """`request` waits no longer; it need not have waited here."""
        self._waiting.pop(request, None)

    @property
    def first(self) -> Request | None:
        """Who goes next, or None if nobody waits."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None


class Dispatch(ABC):
    """The requests that wait, and the rule by which they are sent.

    The first in the rule's order goes first, and holds the others until it has a generator: a large group would
    otherwise wait for ever while small ones fill every gap.
    """

    needs_lengths = False
    """Whether the rule is worth nothing without expected lengths."""

    def __init__(self) -> None:
        self.lengths: ExpectedLengths | None = None
        """What is known of lengths; the data module sets it (`data.length_predictor`)."""
        self._line = Line()

    @abstractmethod
    def order(self, request: Request) -> tuple[float, ...]:
        """Sorts what waits: the smallest goes first, and among equals the first that came."""

    @abstractmethod
    def pick(self, request: Request, generators: Sequence[Loaded]) -> int | None:
        """The position in `generators` of the one that writes `request`, or None to wait until one is free."""

    def add(self, request: Request) -> None:
        """`request` waits from now on."""
        self.estimate(request)
        self._line.push(self.order(request), request)

    def estimate(self, request: Request) -> None:
        """Note how long its responses are expected to go on, if that is known."""
        if self.lengths is not None:
            request.tokens = self.lengths.expected(request.prompt, request.written) - request.written

    def discard(self, request: Request) -> None:
        """`request` waits no longer."""
        self._line.discard(request)

    def send(self, generators: Sequence[Loaded]) -> tuple[Request, int] | None:
        """The request that goes out now, which waits no longer, and its generator's position; None if all wait."""
        request = self._line.first
        if request is None or not generators:
            return None
        position = self.pick(request, generators)
        if position is None:
            return None
        self._line.discard(request)
        return request, position


def has_room(generator: Loaded, request: Request) -> bool:
    """Whether `generator` can write `request` at once.

    A request never waits inside vLLM: one that began to wait there before a sync would start on the keys and values of
    the version before. A group larger than a generator's whole capacity is sent to an idle one.
    """
    return generator.in_flight == 0 or generator.in_flight + request.responses <= generator.capacity


def longest_first(request: Request) -> tuple[float, ...]:
    """The order of what the trainer waits for; among requests of one step the longest, and then the oldest group."""
    return (request.due, -request.tokens, request.priority)
