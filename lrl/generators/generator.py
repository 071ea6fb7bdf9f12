"""One generator as its pool sees it: its state, its version, and the responses it writes.

                        ┌────────── verify ──────────┐
                        │                            ▼
    PAUSED ─ resume ─▶ UNVERIFIED                 SERVING ─ drain ─▶ DRAINING
      ▲                                              │                  │
      └──────────────────── pause ───────────────────┴──────────────────┘        any state ─ evict ─▶ EVICTED

An unverified generator writes under weights that no probe has compared with the policy's. If the
probe fails, its responses are cut back to their length at the resume, before anybody else has seen
the rest.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

from lrl.errors import GeneratorError
from lrl.generators.client import GeneratorClient
from lrl.generators.frames import HOLD_S
from lrl.generators.settings import ServerSettings
from lrl.generators.stats import GeneratorStats
from lrl.routing.request_queue import Slots
from lrl.system.endpoint import Location
from lrl.system.stopwatch import Stopwatch
from lrl.types import Prompt, Rollout, Sampling

log = logging.getLogger(__name__)

KeysAndValues = Literal["recompute", "keep"]
"""The fate of the keys and values of half-written responses at a pause."""
IDLE_S = 1.0
"""Seconds after which a generator without a request has none to write; requests that wait come at
once."""
FLUSH_DEADLINE_S = 5.0
"""For tokens on their way; a generator that needs longer is in trouble, and nobody waits for it."""
CONTROL_DEADLINE_S = 60.0
"""For the short control calls (pause, resume, version): they take milliseconds when nothing is
wrong."""


class ServerHandle(Protocol):
    """A vLLM server as its generator knows it, whichever process started it."""

    number: int
    trust: ssl.SSLContext | None
    """The certificates that its client accepts; None without TLS."""
    token: str
    settings: ServerSettings

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def location(self) -> Location: ...

    @property
    def alive(self) -> bool: ...

    def log_tail(self) -> str: ...


class State(Enum):
    """The states of a generator (drawing at the top of the file)."""

    PAUSED = "paused"
    """Writes nothing: before its first sync, and from a pause to the resume."""
    UNVERIFIED = "unverified"
    """Writes on after a resume; takes no new request."""
    SERVING = "serving"
    """Writes, and takes requests."""
    DRAINING = "draining"
    """Writes on, and takes no new request: a sync is about to pause it."""
    EVICTED = "evicted"
    """Has ended for this run."""


@dataclass(kw_only=True, eq=False)
class Work:
    """A request: the responses to write to one prompt."""

    prompt: Prompt
    sampling: Sampling
    priority: int
    """Lower goes first."""
    deadline_s: float
    """Seconds for a request, once it has a generator."""
    verified: Callable[[], None] = lambda: None
    """Called when the responses that have ended so far stay so, whatever fails."""


class Generator(Slots):
    """One server, its client, and the responses in flight.

    Args:
        server: The vLLM process, started by the run or by another process.
        capacity: Responses it writes at once; more would queue inside vLLM.
    """

    def __init__(self, server: ServerHandle, capacity: int) -> None:
        super().__init__(capacity)
        self.server = server
        self.client = GeneratorClient(server.url, server.name, server.token, server.trust)
        self.state = State.PAUSED
        self.version = -1
        """The policy version of its weights; -1 before its first sync."""
        self.eviction: str | None = None
        """The reason of its eviction; None before."""
        self.pauses = 0
        """Number of pauses so far."""
        self.stopwatch = Stopwatch(lambda: asyncio.get_running_loop().time())
        """Seconds by activity (`lrl.system.stopwatch.GENERATOR`)."""
        self.served_from: float | None = None
        """Time of its first verification, on the clock of the loop."""
        self.stats = GeneratorStats()
        """Counts of its work."""
        self._requests: dict[asyncio.Task[None], Sequence[Rollout]] = {}
        # Requests that end at the mark of the next flush.
        self._leaving: set[asyncio.Task[Any]] = set()
        self._flushes: set[asyncio.Task[None]] = set()
        self._works: set[Work] = set()  # of the calls of `write`
        self._lengths_at_resume: list[tuple[Rollout, int]] = []
        self._verified = asyncio.Event()
        self._verified.set()

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def serving(self) -> bool:
        return self.state is State.SERVING

    @property
    def unverified(self) -> bool:
        """Whether it may write under a version that no probe has verified yet."""
        return self.state is State.UNVERIFIED

    def is_of_use(self, now: float) -> bool:
        """Whether it has written part of a response, or serves since more than `IDLE_S` and nobody
        needs it.

        Args:
            now: Time on the clock of the loop.
        """
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
            for request, rollouts in self.load.items()
            for rollout in rollouts
            if not rollout.finished
        )

    async def write(
        self, work: Work, rollouts: Sequence[Rollout], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Writes `rollouts` to their end or to `interrupt`, and waits until the version that wrote
        them is verified.

        Calls `ended` at the end of each response, verified or not.

        Raises:
            GeneratorError: A request failed, or the generator was evicted; the rollouts keep their
                verified tokens.
        """

        def one_ended() -> None:
            ended()
            if not self.unverified:
                work.verified()

        requests = {
            asyncio.create_task(
                self.client.write(
                    work.prompt.token_ids,
                    part,
                    work.sampling,
                    version=lambda: self.version,
                    priority=work.priority,
                    deadline_s=work.deadline_s,
                    ended=one_ended,
                    leaves=lambda: asyncio.current_task() in self._leaving,
                )
            ): part
            for part in in_requests(rollouts)
        }
        self.stats.begin(len(work.prompt.token_ids), list(requests.values()))
        self._requests |= requests
        self._works.add(work)
        self._note()
        try:
            await _all(list(requests))
            await self._verified.wait()
        finally:
            for request in requests:
                del self._requests[request]
            self._leaving -= requests.keys()
            self._works.remove(work)
            self.stats.end(rollouts)
            self._note()
        if self.eviction is not None:
            raise GeneratorError(self.eviction)

    def interrupt(self, rollouts: Sequence[Rollout]) -> bool:
        """Stops writing `rollouts`: their `write` returns soon, with all tokens that they have at a
        flush.

        Without the flush the tokens that the generator still holds would be drawn again, except
        those of a response that ends among them: that favours short responses. For the same reason
        nothing after the flush is read.

        Returns:
            Whether any was being written.
        """
        moving = {id(rollout) for rollout in rollouts}
        leaving = {
            request
            for request, part in self._requests.items()
            if id(part[0]) in moving and not request.done()
        }
        if leaving:
            self._leaving |= leaving
            flush = asyncio.create_task(self._end_at_a_flush(leaving))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        return bool(leaving)

    async def _end_at_a_flush(self, leaving: set[asyncio.Task[None]]) -> None:
        try:
            await self.client.flush(FLUSH_DEADLINE_S)
        except GeneratorError as error:
            log.warning("Up to %g s of responses that move are written again: %s", HOLD_S, error)
        for request in leaving:  # those without a token have no mark
            request.cancel()

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

        Returns:
            Tokens that will be read again.
        """
        wrote = self.state is not State.PAUSED
        if self.state is not State.EVICTED:
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
        """Continues under `version`, unverified until `verify`. May be repeated when the call
        fails.

        A response that has ended by now has verified tokens alone: no eviction cuts it (invariant
        10).
        """
        if not self.unverified:  # else a call before may have been heard, and tokens written since
            unfinished = [rollout for rollout in self.stats.rollouts if not rollout.finished]
            self._lengths_at_resume = [(rollout, len(rollout.token_ids)) for rollout in unfinished]
            self._verified.clear()
            self.state = State.UNVERIFIED
        self.version = version
        await self.client.post("/resume", deadline_s=deadline_s)
        self._note()

    def verify(self) -> None:
        """Accepts all tokens written so far, and takes requests. Comes too late for an evicted
        generator."""
        if self.state is State.EVICTED:
            return
        self._lengths_at_resume.clear()
        self._verified.set()
        for work in self._works:
            work.verified()
        self._enter(State.SERVING)
        self.served_from = self.served_from or asyncio.get_running_loop().time()

    def evict(self, why: str) -> None:
        """Ends all requests and cuts unverified tokens; does nothing the second time."""
        if self.state is State.EVICTED:
            return
        self.state = State.EVICTED
        self.eviction = why
        for request in self._requests:
            request.cancel()
        for rollout, length in self._lengths_at_resume:
            del rollout.token_ids[length:], rollout.logprobs[length:], rollout.versions[length:]
            rollout.finish_reason = ""
        self._lengths_at_resume.clear()
        self._verified.set()

    def note_waiting(self, waiting: bool) -> None:
        super().note_waiting(waiting)
        self._note()

    def _enter(self, state: State) -> None:
        self.state = state
        self._note()

    def _note(self) -> None:
        """Notes the generator's activity from now on in the stopwatch and the stats."""
        writes = self.state is not State.PAUSED and not self.stats.is_empty
        if writes:
            state = "writing"
        elif not self.serving:
            state = "paused"
        else:
            state = "idle" if self.passed_over else "starved"
        self.stopwatch.enter(state)
        self.stats.set_active(writes, asyncio.get_running_loop().time())


def in_requests(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Divides rollouts into requests: the fresh ones share one, which costs the server less; the
    others have prompts of different lengths, one request each."""
    fresh = [rollout for rollout in rollouts if not rollout.token_ids]
    begun = [[rollout] for rollout in rollouts if rollout.token_ids]
    return [fresh, *begun] if fresh else begun


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits for all tasks, cancelled ones too; the first error, or the end of this task, ends the
    others."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather(works: Sequence[Coroutine[Any, Any, Any]]) -> list[GeneratorError | None]:
    """Runs all at once and returns the failure of each, or None; raises any error that is not a
    GeneratorError."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, GeneratorError):
            raise result
    return [result if isinstance(result, GeneratorError) else None for result in results]
