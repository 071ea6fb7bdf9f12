"""Generators that hold the same version: asked through one door, paused and synced as one.

The door is what keeps versions honest: it closes before a sync and opens after it, and every request that goes through
carries the version its generator holds at that moment. A fleet has one crew for rollouts and may have one for
evaluation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from lrl.data import Prompt, Rollout
from lrl.generators.client import GeneratorClient, GeneratorError
from lrl.generators.sampling import Sampling
from lrl.generators.server import Server
from lrl.rollouts.dispatch import Dispatch, LeastLoaded

CONTROL_DEADLINE_S = 60.0
"""For the short control calls (pause, resume, version): they take milliseconds when nothing is wrong."""
LOG_LINES_IN_ERRORS = 20
SPARE_PLACES = 32
"""Answers a generator can write beside its capacity for rollouts: an evaluation's, and a probe's."""


class Generator:
    """One server, its client, and how loaded it is.

    Args:
        server: The vLLM process.
        capacity: Answers it writes at once; more would queue inside vLLM.
    """

    def __init__(self, server: Server, capacity: int) -> None:
        self.server = server
        self.client = GeneratorClient(server.url, server.name, server.token)
        self.capacity = capacity
        self.in_flight = 0

    async def answer(
        self, prompt: Prompt, sampling: Sampling, version: int, priority: int, deadline_s: float
    ) -> list[Rollout]:
        """One request; a failure carries the end of the server's log."""
        try:
            return await self.client.generate(
                prompt.token_ids, sampling, version=version, priority=priority, deadline_s=deadline_s
            )
        except GeneratorError as error:
            state = "is running" if self.server.alive else "has ended"
            tail = self.server.log_tail(LOG_LINES_IN_ERRORS)
            raise GeneratorError(f"{error}\nIts process {state}. The end of its log:\n{tail}") from error


class Crew:
    """Generators that hold the same version.

    Args:
        generators: Its members.
        dispatch: Which of them answers which prompt.
    """

    def __init__(self, generators: Sequence[Generator], dispatch: Dispatch | None = None) -> None:
        self.generators = list(generators)
        self.dispatch = dispatch or LeastLoaded()
        self.version = 0
        self._open = True
        self._changed = asyncio.Condition()

    async def answer(self, prompt: Prompt, sampling: Sampling, *, priority: int, deadline_s: float) -> list[Rollout]:
        """Have a prompt answered by whichever generator dispatch picks, as soon as the door is open and one has room.

        Args:
            prompt: What to answer.
            sampling: How to draw; `sampling.n` answers come back.
            priority: Lower goes first.
            deadline_s: Seconds for the request itself, once it has a generator.
        """
        async with self._changed:
            while (position := self._pick(sampling.n)) is None:
                await self._changed.wait()
            generator = self.generators[position]
            generator.in_flight += sampling.n
        try:
            return await generator.answer(prompt, sampling, self.version, priority, deadline_s)
        finally:
            generator.in_flight -= sampling.n
            async with self._changed:
                self._changed.notify_all()

    async def spare(self, prompt: Prompt, sampling: Sampling, *, priority: int, deadline_s: float) -> list[Rollout]:
        """Like `answer`, in the places kept beside those for rollouts: neither waits for the other."""
        async with self._changed:
            while not self._open:
                await self._changed.wait()
        generator = min(self.generators, key=lambda generator: generator.in_flight)
        return await generator.answer(prompt, sampling, self.version, priority, deadline_s)

    @property
    def capacity(self) -> int:
        """Answers that the whole crew writes at once."""
        return sum(generator.capacity for generator in self.generators)

    def _pick(self, answers: int) -> int | None:
        return self.dispatch.pick(self.generators, answers) if self._open else None

    async def pause(self) -> None:
        """Close the door and freeze what is being written; it goes on where it was after `resume`."""
        self._open = False
        await self.post("/pause?mode=keep")

    async def resume(self, version: int) -> None:
        """Write on, now with `version`, and open the door."""
        await self.post("/resume")
        async with self._changed:
            self.version, self._open = version, True
            self._changed.notify_all()

    async def post(
        self,
        route: str,
        body: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        deadline_s: float = CONTROL_DEADLINE_S,
    ) -> None:
        """POST to every generator at once: one body for all, or one each."""
        bodies = [body] * len(self.generators) if body is None or isinstance(body, dict) else list(body)
        pairs = list(zip(self.generators, bodies, strict=True))
        await asyncio.gather(*(generator.client.post(route, one, deadline_s=deadline_s) for generator, one in pairs))
