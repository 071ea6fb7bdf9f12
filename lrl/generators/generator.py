"""One generator as its pool sees it: its state, its version, and the responses it writes.

    NEW ─ proved ─▶ SERVING ─ drain ─▶ DRAINING
                     ▲   │                │
                  resume └───── pause ────┤
                     │                    ▼
                     └───────────────── PAUSED        any state ─ evict ─▶ EVICTED

A new generator takes its first request once it is proved (`lrl.weights.proof`).
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

from lrl.errors import GeneratorError
from lrl.generators.client import HOLD_S, GeneratorClient
from lrl.generators.server import JoinedServer, Server
from lrl.routing.dispatch import GeneratorLoad, Request
from lrl.system.event_loop import together
from lrl.system.stopwatch import Stopwatch
from lrl.types import Rollout

log = logging.getLogger(__name__)

KeysAndValues = Literal["recompute", "keep"]
"""The fate of the keys and values of half-written responses at a pause."""
IDLE_S = 1.0
"""Seconds after which a generator without a request has none to write."""
FLUSH_DEADLINE_S = 5.0
"""For tokens on their way; a generator that needs longer is in trouble, and nobody waits for it."""
CONTROL_DEADLINE_S = 60.0
"""For the short control calls (pause, resume, version): they take milliseconds when nothing is
wrong."""


class State(Enum):
    """The states of a generator (drawing at the top of the file)."""

    NEW = "new"
    """Has no request: before its first sync, and until it is proved."""
    PAUSED = "paused"
    SERVING = "serving"
    DRAINING = "draining"
    """Writes on, and takes no new request: it is about to leave the run."""
    EVICTED = "evicted"


class StatsSnapshot(NamedTuple):
    """A generator's counts at one moment."""

    since: float | None
    """Start of the uninterrupted writing, on the clock of the loop; None when it does not write."""
    written: int
    """Tokens that have come from it so far."""
    up_to_date: bool
    """Whether most of the responses being written have new tokens since the snapshot before: a
    generator sends those of all at once, so few others are on their way."""
    read: int
    """Tokens read so far: prompts, and half-written responses that continued here."""
    responses: int
    """Responses being written."""
    context_tokens: int
    """Sum of their contexts, prompt and response so far."""


@dataclass(eq=False)
class InFlight:
    """Responses that a generator writes by one call of the client."""

    request: Request
    rollouts: Sequence[Rollout]
    leaves: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the call is to end at the mark of the next flush."""
    call: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.request.prompt.token_ids)
        self._had = len(self.rollouts[0].token_ids)  # each of them, at the request

    @property
    def written(self) -> int:
        return sum(len(rollout.token_ids) - self._had for rollout in self.rollouts)

    @property
    def read(self) -> int:
        """A new token of any response shows that the prompt, which they share, was read."""
        return self.prompt_tokens + self._had if self.written else 0

    @property
    def unfinished(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if not rollout.finished]


class GeneratorStats:
    """The counts of one generator, evaluations included."""

    def __init__(self) -> None:
        self.requests: dict[InFlight, None] = {}  # in order
        self._since: float | None = None
        # Of the requests that have ended.
        self._written = 0
        self._read = 0
        # Of the responses being written, at the last snapshot, by id.
        self._lengths: dict[int, int] = {}

    @property
    def cached_tokens(self) -> int:
        """Tokens in the KV cache for unfinished responses that have begun, prompts included; not
        those on their way, which a pause sends before it is answered."""
        return sum(
            one.prompt_tokens + len(rollout.token_ids)
            for one in self.requests
            for rollout in one.unfinished
            if rollout.token_ids
        )

    def begin(self, request: Request) -> list[InFlight]:
        """Adds a request. Its fresh responses share a call, which costs the server less; the others
        have prompts of different lengths."""
        fresh = [rollout for rollout in request.rollouts if not rollout.token_ids]
        parts = [[rollout] for rollout in request.rollouts if rollout.token_ids]
        begun = [InFlight(request, part) for part in ([fresh, *parts] if fresh else parts)]
        self.requests |= dict.fromkeys(begun)
        return begun

    def end(self, requests: Sequence[InFlight]) -> None:
        for one in requests:
            del self.requests[one]
            self._written += one.written
            self._read += one.read

    def set_active(self, writes: bool, now: float) -> None:
        """Notes whether the generator writes from `now` on."""
        if not writes:
            self._since = None
        elif self._since is None:
            self._since = now

    def snapshot(self) -> StatsSnapshot:
        before = self._lengths
        lengths = {
            id(rollout): (one.prompt_tokens, len(rollout.token_ids))
            for one in self.requests
            for rollout in one.unfinished
        }
        self._lengths = {name: written for name, (_, written) in lengths.items() if written}
        new = sum(length > before.get(name, 0) for name, length in self._lengths.items())
        return StatsSnapshot(
            since=self._since,
            written=self._written + sum(one.written for one in self.requests),
            up_to_date=0 < len(self._lengths) <= 2 * new,
            read=self._read + sum(one.read for one in self.requests),
            responses=len(lengths),
            context_tokens=sum(map(sum, lengths.values())),
        )


class Generator(GeneratorLoad):
    """One server, started by the run or by another process, its client, and the responses in
    flight, at most `capacity`: more would queue inside vLLM. Raises OSError or ValueError if its
    certificate cannot be read."""

    def __init__(self, server: Server | JoinedServer, capacity: int) -> None:
        super().__init__(capacity)
        self.server = server
        self.client = GeneratorClient(
            server.url, server.name, server.token, server.location.context()
        )
        self.state = State.NEW
        self.version = -1
        """The policy version of its weights; -1 before its first sync."""
        self.syncs = 0
        """Number of versions that it was resumed under."""
        self.eviction: str | None = None
        """The reason of its eviction; None before."""
        self.pauses = 0
        self.stopwatch = Stopwatch(lambda: asyncio.get_running_loop().time())
        """Seconds by activity (`lrl.system.stopwatch.GENERATOR`)."""
        self.served_from: float | None = None
        """When it was first proved, on the clock of the loop; None before."""
        self.stats = GeneratorStats()
        self._flushes: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def serving(self) -> bool:
        return self.state is State.SERVING

    @property
    def in_proof(self) -> bool:
        """Whether it is new, and holds a version that is being proved."""
        return self.state is State.NEW and self.version >= 0

    def is_of_use(self, now: float) -> bool:
        """Whether it has written part of a response, or serves since more than `IDLE_S` and nobody
        needs it; `now` is on the clock of the loop."""
        if self.client.last_token_at:
            return True
        if self.load or not self.serving or self.served_from is None:
            return False
        return now - self.served_from > IDLE_S

    @property
    def outstanding_tokens(self) -> float:
        """Expected tokens that the responses in flight still need, at least one each."""
        return sum(
            max(1.0, request.written + request.tokens - len(rollout.token_ids))
            for request in self.load
            for rollout in request.unfinished
        )

    async def write(self, request: Request) -> None:
        """Writes the responses of `request` to their end or to `interrupt`.

        Raises:
            GeneratorError: A call failed, or the generator was evicted; the rollouts keep their
                tokens.
        """
        parts = self.stats.begin(request)
        for part in parts:
            writing = self.client.write(
                request.prompt.token_ids,
                part.rollouts,
                request.sampling,
                version=lambda: self.version,
                priority=request.priority,
                deadline_s=request.deadline_s,
                ended=request.ended,
                leaves=part.leaves.is_set,
            )
            part.call = asyncio.create_task(writing)
        self._note()
        try:
            await together([part.call for part in parts])
        finally:
            self.stats.end(parts)
            self._note()
        if self.eviction is not None:
            raise GeneratorError(self.eviction)

    def interrupt(self, request: Request) -> bool:
        """Stops writing the responses of `request`: its `write` returns soon, with all tokens that
        they have at a flush. Returns whether any was being written.

        Without the flush the tokens that the generator still holds would be drawn again, except
        those of a response that ends among them: that favours short responses. For the same reason
        nothing after the flush is read.
        """
        parts = [part for part in self.stats.requests if part.request is request]
        leaving = [part for part in parts if part.unfinished]
        for part in leaving:
            part.leaves.set()
        if leaving:
            flush = asyncio.create_task(self._end_at_a_flush(leaving))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        return bool(leaving)

    async def _end_at_a_flush(self, leaving: Sequence[InFlight]) -> None:
        await self.flush()
        for part in leaving:  # those without a token have no mark
            part.call.cancel()

    async def flush(self) -> None:
        """Waits until the responses have all tokens that it wrote. If it does not send them in
        time, they lack those of at most `HOLD_S`."""
        try:
            await self.client.flush(FLUSH_DEADLINE_S)
        except GeneratorError as error:
            text = "Up to %g s of half-written responses are not waited for: %s"
            log.warning(text, HOLD_S, error)

    def drain(self) -> None:
        """Takes no new request; the responses in flight continue."""
        if self.state is State.SERVING:
            self._enter(State.DRAINING)

    async def pause(
        self, keys_and_values: KeysAndValues = "recompute", deadline_s: float = CONTROL_DEADLINE_S
    ) -> int:
        """Freezes the responses in flight; they continue at `resume`.

        Args:
            keys_and_values: `recompute` drops those of the responses in flight, which are read
                again under the new weights after the resume; `keep` leaves them.
            deadline_s: Seconds.

        Returns the tokens that will be read again.
        """
        wrote = self.state is not State.PAUSED
        if self.state not in (State.NEW, State.EVICTED):
            self._enter(State.PAUSED)
        self.pauses += 1
        clears = keys_and_values == "recompute"
        await self.client.post(
            f"/pause?mode=keep&clear_cache={str(clears).lower()}", deadline_s=deadline_s
        )
        # A second pause finds nothing to drop.
        return self.stats.cached_tokens if clears and wrote else 0

    async def confirm(
        self, route: str, expected: dict[str, Any], deadline_s: float = CONTROL_DEADLINE_S
    ) -> None:
        """Raises GeneratorError unless GET `route` returns `expected`: an answered call is no proof
        of its effect."""
        found = await self.client.get(route, deadline_s=deadline_s)
        if found != expected:
            raise GeneratorError(
                f"{self.name}: {route} says {str(found)[:200]}; it should be {expected}."
            )

    async def resume(self, version: int, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Continues under `version`, and serves unless it is new. May be repeated when the call
        fails."""
        self.syncs += self.version != version
        self.version = version  # before the call: tokens may come before its answer
        await self.client.post("/resume", deadline_s=deadline_s)
        if self.state is State.PAUSED:
            self._enter(State.SERVING)

    def open(self) -> None:
        """Takes requests: it is proved. Comes too late for an evicted generator."""
        if self.state is State.NEW:
            self._enter(State.SERVING)
            self.served_from = asyncio.get_running_loop().time()

    def evict(self, why: str) -> None:
        """Ends all requests; does nothing the second time."""
        if self.state is State.EVICTED:
            return
        self.state = State.EVICTED
        self.eviction = why
        for part in self.stats.requests:
            part.call.cancel()

    def _enter(self, state: State) -> None:
        self.state = state
        self._note()

    def _note(self) -> None:
        """Notes the generator's activity from now on in the stopwatch and the stats."""
        writes = self.state is not State.PAUSED and bool(self.stats.requests)
        self.stopwatch.enter("writing" if writes else "starved" if self.serving else "paused")
        self.stats.set_active(writes, asyncio.get_running_loop().time())


async def gather(works: Sequence[Coroutine[Any, Any, Any]]) -> list[GeneratorError | None]:
    """Runs all at once and returns the failure of each, or None; raises any other error."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, GeneratorError):
            raise result
    return [result if isinstance(result, GeneratorError) else None for result in results]
