"""Base class of the dispatch policies: requests, their priority queue, the load of a generator and
its time for a token."""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lrl.system.config_errors import above, at_least
from lrl.types import Prompt


class GeneratorLoad(Protocol):
    """A generator as a dispatch policy sees it."""

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
    """Expected lengths of unwritten responses: `lrl.routing.length_predictor.LengthPredictor`, or
    an oracle."""

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Returns the expected tokens of a whole response that has `written` already; more than
        `written`."""

    def quantile(self, share: float) -> float:
        """Returns the length in tokens that this share of the recent responses does not exceed."""


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """Milliseconds of decoding, of which only the ratios matter: StreamRL's model (2504.15930,
    section 5), with which placements are compared.

    The defaults are StreamRL's 7B model on an H800 (figure 6: 8.4 ms for one response, 37 ms for
    512; the line meets the points between them within 5 %).

    Args:
        step_ms: Time of a decoding step, however many responses get a token.
        response_ms: Added time for each response of the step.

    Raises:
        ValueError: A setting is outside its range.
    """

    step_ms: float = 8.4
    response_ms: float = 0.056

    def __post_init__(self) -> None:
        above(0, "decode_latency", step_ms=self.step_ms)
        at_least(0, "decode_latency", response_ms=self.response_ms)

    def per_token(self, responses: int) -> float:
        """Returns PTL(BS), the milliseconds of a step in which each of `responses` gets one
        token."""
        return self.step_ms + self.response_ms * responses

    def latency(self, responses: int, tokens: float, capacity: int) -> float:
        """Returns the milliseconds for responses of `tokens` tokens each on one generator of
        `capacity` (equation 2)."""
        if responses == 0:
            return 0.0
        at_once = min(responses, capacity)
        return self.per_token(at_once) * tokens * math.ceil(responses / at_once)


@dataclass(eq=False, slots=True)
class Home:
    """The generator that wrote last for an episode: its cache has the episode's beginning."""

    generator: GeneratorLoad | None = None


@dataclass(eq=False, slots=True)
class Request:
    """The unfinished responses to one prompt, which wait for a generator."""

    prompt: Prompt
    responses: int
    """Number of responses; they go to one generator."""
    priority: int
    """The group's index in the run."""
    due: int = 0
    """The step that trains it (`Group.due`): the trainer waits for the smallest first."""
    written: float = 0.0
    """Mean tokens that each response has already."""
    tokens: float = 1.0
    """Expected tokens that each response still needs; 1 where nothing is known.
    `DispatchPolicy.estimate` sets it."""
    home: GeneratorLoad | None = None
    """A generator that writes it for less than others do, since it need not read the beginning."""


class PriorityQueue:
    """Requests by a sort key: the smallest first, and among equals the first that came."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Request]] = []
        # A set in order of arrival. A discarded request stays in the heap until it comes first: a
        # removal from the heap would cost as much as there are requests.
        self._waiting: dict[Request, None] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def push(self, order: tuple[float, ...], request: Request) -> None:
        """Adds `request` with the sort key `order`."""
        self._arrivals += 1
        self._waiting[request] = None
        heapq.heappush(self._heap, (order, self._arrivals, request))

    def discard(self, request: Request) -> None:
        """Removes `request` if it is here."""
        self._waiting.pop(request, None)

    @property
    def first(self) -> Request | None:
        """The next request, or None if the queue is empty."""
        while self._heap and self._heap[0][2] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None


class DispatchPolicy(ABC):
    """Waiting requests, and the choice of a generator for the first of them.

    The first request holds the others until it has a generator: a large group would otherwise wait
    for ever while small ones fill every gap.
    """

    needs_lengths = False
    """Whether the policy is useless without expected lengths."""

    def __init__(self) -> None:
        self.lengths: ExpectedLengths | None = None
        """Source of expected lengths; whoever makes the run sets it."""
        self._queue = PriorityQueue()

    def order(self, request: Request) -> tuple[float, ...]:
        """Returns the sort key of `request`: the smallest goes first. By default that is the oldest
        group."""
        return (request.priority,)

    @abstractmethod
    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        """Returns the position of the generator that writes `request`, or None to wait until one is
        free."""

    def add(self, request: Request) -> None:
        """Adds a request that waits."""
        self.estimate(request)
        self._queue.push(self.order(request), request)

    def estimate(self, request: Request) -> None:
        """Sets `request.tokens` if lengths are known."""
        if self.lengths is not None:
            request.tokens = (
                self.lengths.expected(request.prompt, request.written) - request.written
            )

    def discard(self, request: Request) -> None:
        """Removes a request that waits no longer."""
        self._queue.discard(request)

    def send(self, generators: Sequence[GeneratorLoad]) -> tuple[Request, int] | None:
        """Removes the next request and returns it with its generator's position, or returns None if
        all wait."""
        request = self._queue.first
        if request is None or not generators:
            return None
        position = home_of(request, generators)
        if position is None and (position := self.pick(request, generators)) is None:
            return None
        self._queue.discard(request)
        return request, position


def has_room(generator: GeneratorLoad, request: Request) -> bool:
    """Returns whether `generator` can write `request` at once.

    A request never waits inside vLLM: one that began to wait there before a sync would start on the
    keys and values of the version before. A group larger than a generator's whole capacity is sent
    to an idle one.
    """
    return generator.in_flight == 0 or generator.in_flight + request.responses <= generator.capacity


def home_of(request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
    """Returns the position of the request's home if it has room, else None: a preference, which
    holds no request up."""
    for position, generator in enumerate(generators):
        if generator is request.home and has_room(generator, request):
            return position
    return None


def longest_first(request: Request) -> tuple[float, ...]:
    """Returns a sort key by which the earliest step goes first, in it the longest request, then the
    oldest group."""
    return (request.due, -request.tokens, request.priority)
