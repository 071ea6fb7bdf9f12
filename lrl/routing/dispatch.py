"""Dispatch policies: the generator and the order of the requests. YAML names a policy by its
`class_path`.

A policy sees the waiting requests, the load of each generator, and expected lengths.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lrl.errors import ConfigError
from lrl.routing.length_predictor import LengthPredictor
from lrl.types import Prompt, Rollout, Sampling

LONG, REST = 0.9, 0.5
"""Quantiles of the recent lengths that stand for the long responses and for the rest."""


class GeneratorLoad(ABC):
    """Base class of a generator: its slots for responses, as a dispatch policy sees them."""

    version: int
    """Policy version it holds."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Responses it writes at once."""
        self.in_flight = 0
        """Rollout responses that it writes or is about to write."""
        self.load: list[Request] = []
        """The requests that hold its slots."""

    @property
    @abstractmethod
    def serving(self) -> bool:
        """Whether it takes requests."""

    @property
    @abstractmethod
    def outstanding_tokens(self) -> float:
        """Expected tokens that the responses in flight still need, at least one each."""

    @abstractmethod
    def interrupt(self, request: Request) -> bool:
        """Stops writing the responses of `request`, which keep their tokens; returns whether any
        was being written."""

    def reserve(self, request: Request) -> None:
        """Reserves a slot for each response, until it ends (`release`) or until `free`."""
        self.in_flight += request.responses
        self.load.append(request)

    def release(self) -> None:
        self.in_flight -= 1

    def free(self, request: Request) -> None:
        self.in_flight -= len(request.unfinished)
        self.load.remove(request)


@dataclass(frozen=True, slots=True)
class DecodeLatency:
    """Milliseconds of decoding, of which only the ratios matter: StreamRL's model (2504.15930,
    section 5), for 7B on an H800 (figure 6, within 5 %).

    Args:
        step_ms: Time of a decoding step, however many responses get a token.
        response_ms: Added time for each response of the step.
    """

    step_ms: float = 8.4
    response_ms: float = 0.056

    def per_token(self, responses: int) -> float:
        """Returns PTL(BS), the milliseconds of a step with a token for each of `responses`."""
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
    rollouts: Sequence[Rollout]
    """They go to one generator."""
    priority: int
    """The group's index in the run; lower goes first."""
    due: int = 0
    """The step that trains it (`Group.due`): the trainer waits for the smallest first."""
    tokens: float = 1.0
    """Expected tokens that each response still needs; 1 where nothing is known.
    `DispatchPolicy.estimate` sets it."""
    home: GeneratorLoad | None = None
    """A generator that writes it for less than others do, since it need not read the beginning."""
    sampling: Sampling = field(default_factory=Sampling)
    deadline_s: float = math.inf
    """Seconds for it, once it has a generator."""
    ended: Callable[[], None] = lambda: None
    """Called at the end of each response."""
    moved_at: int = field(init=False, default=-1)
    """The version under which it moved to its generator; -1 if it did not."""
    responses: int = field(init=False)
    """Number of responses."""
    written: float = field(init=False)
    """Mean tokens that each response has already."""

    def __post_init__(self) -> None:
        self.responses = len(self.rollouts)
        self.written = sum(len(one.token_ids) for one in self.rollouts) / self.responses

    @property
    def unfinished(self) -> list[Rollout]:
        return [one for one in self.rollouts if not one.finished]


def has_room(generator: GeneratorLoad, request: Request) -> bool:
    """Whether `generator` can write `request` at once, or is idle and the request larger than its
    whole capacity.

    A request never waits inside vLLM: one that began to wait there before a sync would start on the
    keys and values of the version before.
    """
    return generator.in_flight == 0 or generator.in_flight + request.responses <= generator.capacity


class DispatchPolicy(ABC):
    """Waiting requests, and the choice of a generator for the first of them.

    The first request holds the others until it has a generator: a large group would otherwise wait
    for ever while small ones fill every gap.
    """

    needs_lengths = False
    """Whether the policy is useless without expected lengths."""

    def __init__(self) -> None:
        self.lengths: LengthPredictor | None = None
        """Whoever makes the run sets it."""
        self._waiting: list[Request] = []
        """In their `order`; among equals the first that came goes first."""

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
        insort(self._waiting, request, key=self.order)

    def estimate(self, request: Request) -> None:
        """Sets `request.tokens` if lengths are known."""
        if self.lengths is not None:
            expected = self.lengths.expected(request.prompt, request.written)
            request.tokens = expected - request.written

    def discard(self, request: Request) -> None:
        """Removes a request that waits no longer."""
        self._waiting.remove(request)

    def send(self, generators: Sequence[GeneratorLoad]) -> tuple[Request, int] | None:
        """Removes the next request and returns it with its generator's position, its home if that
        has room; returns None if all wait."""
        if not self._waiting or not generators:
            return None
        request = self._waiting[0]
        homes = (at for at, generator in enumerate(generators) if generator is request.home)
        position = next(homes, None)
        if position is None or not has_room(generators[position], request):
            position = self.pick(request, generators)
        if position is None:
            return None
        self.discard(request)
        return request, position


class LeastLoaded(DispatchPolicy):
    """The generator with the fewest responses in flight, if it has room; the oldest group first."""

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        best = min(range(len(generators)), key=lambda position: generators[position].in_flight)
        return best if has_room(generators[best], request) else None


class RoundRobin(DispatchPolicy):
    """The generators with room in turn; the oldest group first. A baseline without lengths."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        for turn in range(self._turn, self._turn + len(generators)):
            position = turn % len(generators)
            if has_room(generators[position], request):
                self._turn = position + 1
                return position
        return None


class LeastTokens(DispatchPolicy):
    """Of the generators with room, the one whose responses still need the fewest tokens.

    The longest request of a step goes first: the step ends with its last response, so that must not
    start last (Graham 1969: within 4/3 of the best schedule, if the lengths are known).
    """

    needs_lengths = True

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.due, -request.tokens, request.priority)

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        free = [at for at, generator in enumerate(generators) if has_room(generator, request)]
        return min(free, key=lambda at: generators[at].outstanding_tokens, default=None)


class SkewnessAware(LeastTokens):
    """Divides the generators between the long requests and the rest, as StreamRL's skewness-aware
    dispatching does (2504.15930, algorithm 2); the longest first within each part.

    A generator with fewer responses writes each of them faster, so the few longest requests get
    generators for themselves: as many as give both parts together the lowest latency, by all
    requests that wait when those of a new step come. A latency is the time at which both parts are
    done; the paper prints their sum.

    Unlike the paper's, an idle generator takes a request of the other part, if its own part has
    none of the step that the trainer waits for; and requests of a later step wait until those of
    earlier steps are sent.

    Args:
        long_tail: Share of the requests that counts as long, in (0, 1); the paper's is 0.2.
        decode_latency: A generator's time for a token.
    """

    def __init__(self, long_tail: float = 0.2, decode_latency: DecodeLatency | None = None) -> None:
        super().__init__()
        if not 0 < long_tail < 1:
            raise ConfigError(
                f"data.dispatch.long_tail is {long_tail}; it is a share of the requests, between 0 "
                "and 1."
            )
        self.long_tail = long_tail
        self.decode_latency = decode_latency or DecodeLatency()
        self._long: set[Request] = set()  # the others are the rest
        self._shortest_long = math.inf  # tokens, at the last division
        self._long_generators = 0  # the first so many of the pool
        self._divided_for = (-1, 0)  # the newest step, and the number of generators
        self._newest_due = -1

    def add(self, request: Request) -> None:
        super().add(request)
        self._newest_due = max(self._newest_due, request.due)
        if request.tokens > self._shortest_long:
            self._long.add(request)

    def discard(self, request: Request) -> None:
        super().discard(request)
        self._long.discard(request)

    def send(self, generators: Sequence[GeneratorLoad]) -> tuple[Request, int] | None:
        if generators and self._divided_for != (self._newest_due, len(generators)):
            self._divide(generators)
        for is_long in (True, False):
            request = self._first(is_long)
            if request is None or request.due != self._waiting[0].due:
                continue
            if (position := self.pick(request, generators)) is not None:
                self.discard(request)
                return request, position
        return None

    def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
        is_long = request in self._long
        other = self._first(not is_long)
        helps = other is None or other.due != request.due

        def may_write(at: int, generator: GeneratorLoad) -> bool:
            own = (at < self._long_generators) == is_long or len(generators) == 1
            return (own or (helps and generator.in_flight == 0)) and has_room(generator, request)

        free = [at for at, generator in enumerate(generators) if may_write(at, generator)]
        return min(free, key=lambda at: generators[at].in_flight, default=None)

    def _first(self, is_long: bool) -> Request | None:
        return next((one for one in self._waiting if (one in self._long) == is_long), None)

    def _divide(self, generators: Sequence[GeneratorLoad]) -> None:
        """Runs algorithm 2 over all requests that wait."""
        waiting = sorted(self._waiting, key=lambda request: -request.tokens)
        if self.lengths is None or not waiting:
            return
        self._divided_for = self._newest_due, len(generators)
        cut = math.ceil(self.long_tail * len(waiting))
        self._shortest_long = waiting[cut - 1].tokens
        self._long = set(waiting[:cut])
        self._long_generators = self.generators_for_the_long(
            (sum(request.responses for request in waiting[:cut]), self.lengths.quantile(LONG)),
            (sum(request.responses for request in waiting[cut:]), self.lengths.quantile(REST)),
            generators=len(generators),
            capacity=min(generator.capacity for generator in generators),
        )

    def generators_for_the_long(
        self, long: tuple[int, float], rest: tuple[int, float], generators: int, capacity: int
    ) -> int:
        """Returns N_l of algorithm 2: of `generators` (N_l + N_r, each part gets one), those that
        write the long responses; the fewest among equally good numbers. `long` and `rest` are the
        number of a part's responses, and the tokens that stand for the length of one."""

        def latency(part: tuple[int, float], share: int) -> float:
            responses, tokens = part
            return self.decode_latency.latency(math.ceil(responses / share), tokens, capacity)

        def total(share: int) -> float:
            return max(latency(long, share), latency(rest, generators - share))

        return min(range(1, generators), key=total, default=0)
