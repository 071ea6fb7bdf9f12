"""One generator as its pool sees it: what it writes, which version it holds, and whether it may be trusted.

    closed -> (sync, probe) -> open -> pause -> resume -> proved -> open ...        and, once, taken out

What it writes between a resume and the probe behind it is unproved: should the probe fail, the responses are cut back
to what they had at the resume, and nobody has seen the rest.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, Protocol

from lrl.generators.client import GeneratorClient, GeneratorError
from lrl.generators.settings import ServerSettings
from lrl.generators.stats import GeneratorStats
from lrl.routing.request_queue import Slots
from lrl.runtime.stopwatch import Stopwatch
from lrl.types import Prompt, Rollout, Sampling

KeysAndValues = Literal["recompute", "keep"]
"""What a pause does with the keys and values of what is being written."""
CONTROL_DEADLINE_S = 60.0
"""For the short control calls (pause, resume, version): they take milliseconds when nothing is wrong."""


class ServerHandle(Protocol):
    """A vLLM server as its generator knows it, whichever process started it."""

    number: int
    """Of the generator."""
    trust: ssl.SSLContext | None
    """The certificates that its client accepts; None without TLS."""
    token: str
    settings: ServerSettings

    @property
    def name(self) -> str:
        """Its name in errors and logs."""

    @property
    def url(self) -> str:
        """Its address."""

    @property
    def alive(self) -> bool:
        """Whether its process runs."""

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""


class Generator(Slots):
    """One server, its client, and what it is writing.

    Args:
        server: The vLLM process, started by the run or by another process.
        capacity: Responses it writes at once; more would queue inside vLLM.
    """

    def __init__(self, server: ServerHandle, capacity: int) -> None:
        super().__init__(capacity)
        self.server = server
        self.client = GeneratorClient(server.url, server.name, server.token, server.trust)
        self.version = -1
        """What it holds; -1 before its first sync."""
        self.open = False
        """Whether it may be asked: it holds a version that is proved, and is not paused."""
        self.out: str | None = None
        """Why it was taken out; it never serves again."""
        self.pauses = 0
        """How often it was paused so far."""
        self.stopwatch = Stopwatch(lambda: asyncio.get_running_loop().time())
        """What it does at this moment (`lrl.runtime.stopwatch.GENERATOR`)."""
        self.served_from: float | None = None
        """When it first served, on the clock of the loop."""
        self._stands = True
        self.stats = GeneratorStats()
        """What it has done so far."""
        self._requests: dict[asyncio.Task[None], Sequence[Rollout]] = {}
        self._unverified: list[tuple[Rollout, int]] = []
        self._proved = asyncio.Event()
        self._proved.set()

    @property
    def name(self) -> str:
        """What errors and logs call it."""
        return self.server.name

    @property
    def unverified(self) -> bool:
        """Whether it writes on under a version that no probe has proved yet."""
        return not self._proved.is_set()

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
        self,
        prompt: Prompt,
        rollouts: Sequence[Rollout],
        sampling: Sampling,
        priority: int,
        deadline_s: float,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Write `rollouts` to their end or to `interrupt`, and wait until the version that wrote them is proved.

        `ended` is told of each response's end, proved or not.

        Raises:
            GeneratorError: A request failed, or the generator was taken out; the rollouts keep what is proved.
        """
        how: dict[str, Any] = {"version": lambda: self.version, "priority": priority, "deadline_s": deadline_s}
        requests = {
            asyncio.create_task(self.client.write(prompt.token_ids, part, sampling, **how, ended=ended)): part
            for part in in_requests(rollouts)
        }
        self.stats.begin(len(prompt.token_ids), list(requests.values()))
        self._requests |= requests
        self._note()
        try:
            await _all(list(requests))
            await self._proved.wait()
        finally:
            for request in requests:
                del self._requests[request]
            self.stats.end(rollouts)
            self._note()
        if self.out is not None:
            raise GeneratorError(self.out)

    def interrupt(self, rollouts: Sequence[Rollout]) -> bool:
        """Stop writing `rollouts`: their `write` returns soon, and they keep what has come.

        Returns:
            Whether any was being written.
        """
        those = {id(rollout) for rollout in rollouts}
        cancelled = [request.cancel() for request, part in self._requests.items() if id(part[0]) in those]
        return any(cancelled)

    def drain(self) -> None:
        """Take nothing new; what is being written goes on."""
        self.open = False
        self._note()

    async def pause(self, keys_and_values: KeysAndValues = "recompute", deadline_s: float = CONTROL_DEADLINE_S) -> int:
        """Take nothing new and freeze what is being written; it goes on where it was after `resume`.

        Args:
            keys_and_values: `recompute` drops those of what is being written, so that it is read again under the new
                weights after the resume; `keep` leaves them.
            deadline_s: Seconds.

        Returns:
            Tokens that will be read again.
        """
        stood, self.open, self._stands = self._stands, False, True
        self._note()
        self.pauses += 1
        clears = keys_and_values == "recompute"
        await self.client.post(f"/pause?mode=keep&clear_cache={str(clears).lower()}", deadline_s=deadline_s)
        return self.stats.held_tokens if clears and not stood else 0  # a second pause finds nothing to drop

    async def confirm(self, route: str, expected: dict[str, Any], deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Raise GeneratorError unless GET `route` answers `expected`: a call that came back was not always done."""
        found = await self.client.get(route, deadline_s=deadline_s)
        if found != expected:
            raise GeneratorError(f"{self.name}: {route} says {str(found)[:200]}; it should be {expected}.")

    async def resume(self, version: int, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Write on under `version`, unproved until `verify`; new requests wait for that.

        A response that has ended by now was written by versions that are proved: it is final, whatever comes. After a
        call that failed it may be told again: it may have heard the first one and have written since.
        """
        if not self.unverified:
            unfinished = [rollout for rollout in self.stats.rollouts if not rollout.finished]
            self._unverified = [(rollout, len(rollout.token_ids)) for rollout in unfinished]
            self._proved.clear()
        self.version = version
        await self.client.post("/resume", deadline_s=deadline_s)
        self._stands = False
        self._note()

    def verify(self) -> None:
        """The generator computes what the policy computes: what it has written counts, and it may be asked.

        For one that was taken out meanwhile this comes too late.
        """
        if self.out is not None:
            return
        self._unverified.clear()
        self._proved.set()
        self.open, self._stands = True, False
        self._note()
        self.served_from = self.served_from or asyncio.get_running_loop().time()

    def _note(self) -> None:
        """Tell the stopwatch what is done from now on."""
        writes = not (self.stats.is_empty or self._stands)
        nothing = "idle" if self.passed_over else "starved"
        self.stopwatch.enter("writing" if writes else nothing if self.open else "paused")
        self.stats.set_active(writes, asyncio.get_running_loop().time())

    def note_waiting(self, waiting: bool) -> None:
        """See `Slots.note_waiting`."""
        super().note_waiting(waiting)
        self._note()

    def evict(self, why: str) -> None:
        """End all it was asked, and cut what is unproved; does nothing the second time."""
        if self.out is not None:
            return
        self.out, self.open = why, False
        for request in self._requests:
            request.cancel()
        for rollout, proved in self._unverified:
            del rollout.token_ids[proved:], rollout.logprobs[proved:], rollout.versions[proved:]
            rollout.finish_reason = ""
        self._unverified.clear()
        self._proved.set()


def in_requests(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """`rollouts` by request: the fresh ones share one, which costs the server less; each other has its own prompt."""
    fresh = [rollout for rollout in rollouts if not rollout.token_ids]
    return [part for part in (fresh, *([rollout] for rollout in rollouts if rollout.token_ids)) if part]


async def _all(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for all, cancelled ones too; the first error, or the end of this task, ends the others."""
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
    """Run all at once and say in their order which failed; what is no generator's failure is raised."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, GeneratorError):
            raise result
    return [result if isinstance(result, GeneratorError) else None for result in results]
