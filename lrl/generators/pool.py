"""Generators that hold the same version: asked through one door, which finds another one when one fails.

A fleet has one pool for rollouts and may have one for evaluation. A generator joins its pool at a sync, and serves when
that is proved; it leaves at its first failure, and the responses it was writing go on elsewhere with the tokens they
have.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from lrl.generators.client import GeneratorError, GeneratorTimeout, RequestRejected
from lrl.generators.generator import Generator
from lrl.routing.dispatch import Dispatch, LeastLoaded, Request
from lrl.routing.request_queue import RequestQueue
from lrl.types import Prompt, Rollout, Sampling

log = logging.getLogger(__name__)

Probe = Callable[[Generator], Coroutine[Any, Any, Any]]
"""Compares a generator with the policy; raises GeneratorError if they disagree."""
LOG_LINES_IN_ERRORS = 20
SPARE_SLOTS = 32
"""Answers a generator can write beside its capacity for rollouts: an evaluation's, and a probe's."""


class GeneratorPool:
    """Generators that hold the same version.

    Args:
        generators: Its members.
        dispatch: Which of them responses which prompt, and in which order.
    """

    def __init__(self, generators: Sequence[Generator], dispatch: Dispatch | None = None) -> None:
        self.generators = list(generators)
        self.pending: list[Generator] = []
        """They answer already and wait for the next sync, at which they join."""
        self.requests = RequestQueue(dispatch or LeastLoaded(), lambda: self.serving)
        self.reissued = 0
        """Responses that went on elsewhere because their generator was taken out."""
        self.on_evicted: Callable[[Generator], None] = lambda generator: None
        """Told of each generator that was taken out."""
        self.syncing = False
        """Whether a sync is going on."""
        self.has_served = False
        """Whether any of them was ever proved to hold a version."""
        self.alone_since: float | None = None
        """When a trainer first found none of them serving, since one last did; on `time.monotonic`."""
        self.last_loss = ""
        """Why the last one was."""
        self._changed = asyncio.Condition()

    @property
    def serving(self) -> list[Generator]:
        """The members that may be asked."""
        return [generator for generator in self.generators if generator.open]

    @property
    def alive(self) -> list[Generator]:
        """The members that serve, that wait for their proof, or that a sync has in hand."""
        return [one for one in self.generators if one.open or one.unverified or self.syncing]

    @property
    def capacity(self) -> int:
        """Responses that the whole pool writes at once."""
        return sum(generator.capacity for generator in self.generators)

    async def generate(
        self,
        prompt: Prompt,
        rollouts: Sequence[Rollout],
        sampling: Sampling,
        *,
        priority: int,
        deadline_s: float,
        due: int = 0,
    ) -> None:
        """Have every unfinished rollout written to its end, by whichever generator dispatch picks and has room.

        Should that one fail, another goes on with what is there; so this waits as long as there is none.

        Args:
            prompt: What to answer.
            rollouts: They grow in place.
            sampling: How to draw.
            priority: Lower goes first.
            deadline_s: Seconds for a request, once it has a generator.
            due: The step that trains the responses, for dispatch.

        Raises:
            GeneratorError: The request itself is wrong, or takes longer than `deadline_s`.
        """
        target: Generator | None = None
        while unfinished := [rollout for rollout in rollouts if not rollout.finished]:
            written = sum(len(rollout.token_ids) for rollout in unfinished) / len(unfinished)
            request = Request(prompt, len(unfinished), priority, due, written)
            generator = await self.requests.enter(request, unfinished, target)
            try:
                if generator.open:  # the door may have closed since it was chosen
                    ended = partial(self.requests.release, generator, request)
                    await self._write(generator, prompt, unfinished, sampling, priority, deadline_s, ended)
            finally:
                target = self.requests.leave(generator, request)

    async def generate_spare(
        self, prompt: Prompt, rollouts: Sequence[Rollout], sampling: Sampling, *, priority: int, deadline_s: float
    ) -> None:
        """Like `generate`, in the places kept beside those for rollouts: neither waits for the other."""
        while unfinished := [rollout for rollout in rollouts if not rollout.finished]:
            async with self._changed:
                while not self.serving:
                    await self._changed.wait()
            generator = min(self.serving, key=lambda generator: generator.in_flight)
            await self._write(generator, prompt, unfinished, sampling, priority, deadline_s)

    async def _write(
        self,
        generator: Generator,
        prompt: Prompt,
        rollouts: list[Rollout],
        sampling: Sampling,
        priority: int,
        deadline_s: float,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Have one generator write; its failure takes it out, and leaves rollouts unfinished."""
        try:
            await generator.write(prompt, rollouts, sampling, priority, deadline_s, ended)
        except GeneratorTimeout as error:
            raise GeneratorTimeout(
                f"{error} Raise data.rollout_timeout_s, or lower data.max_response_tokens."
            ) from error
        except RequestRejected:
            raise
        except GeneratorError as error:
            self.evict(generator, str(error))
            self.reissued += sum(not rollout.finished for rollout in rollouts)

    def evict(self, generator: Generator, why: str) -> None:
        """Leave out a generator that failed, for good; does nothing when it is out already."""
        if generator.out is not None:
            return
        state = "is running" if generator.server.alive else "has ended"
        tail = generator.server.log_tail(LOG_LINES_IN_ERRORS)
        name = generator.name.capitalize()
        log.warning("%s is taken out: %s\nIts process %s. The end of its log:\n%s", name, why, state, tail)
        self.last_loss = why
        self.remove(generator, why)
        self.on_evicted(generator)

    def remove(self, generator: Generator, why: str) -> None:
        """Leave out a generator; what it writes goes on elsewhere, with the tokens it has."""
        generator.evict(why)
        members = self.pending if generator in self.pending else self.generators
        members.remove(generator)

    async def admit_pending(self) -> None:
        """A sync begins: make the newcomers members; they are closed until it is proved."""
        self.syncing = True
        self.generators += self.pending
        self.pending.clear()

    async def drain(self, generators: Sequence[Generator]) -> None:
        """Nothing begins any more under what these hold."""
        for generator in generators:
            generator.drain()

    async def finish_sync(self, failed: Mapping[Generator, str]) -> None:
        """A sync is over: leave out who failed it."""
        for generator, why in failed.items():
            self.evict(generator, why)
        self.syncing = False
        await self._wake()

    async def verify(self, generators: Sequence[Generator], probe: Probe) -> dict[Generator, str]:
        """Open the door to each of `generators` as soon as it passes the probe; who fails is taken out.

        Until one has ever passed, nobody is: the run is set up wrongly then, which whoever waits for this will say.

        Returns:
            Who failed, and why.
        """
        failed: dict[Generator, str] = {}
        clock = asyncio.get_running_loop().time

        async def verify(generator: Generator) -> None:
            started = clock()
            try:
                await probe(generator)
            except GeneratorError as error:
                seconds = clock() - started
                why = f"probe for weight version {generator.version} failed after {seconds:.1f} s: {error}"
                failed[generator] = why
                if self.has_served:
                    self.evict(generator, why)
            else:
                generator.verify()
                await self._wake()

        await asyncio.gather(*(verify(generator) for generator in generators))
        return failed

    async def drop_unverified(self, why: str) -> None:
        """End what is written since a resume that nobody has proved, and take it back; the run is ending."""
        for generator in self.generators:
            if generator.unverified:
                generator.evict(why)

    async def lap(self) -> dict[str, float]:
        """Generator-seconds by what they went into since the last lap (`lrl.runtime.stopwatch.GENERATOR`)."""
        seconds = defaultdict[str, float](float)
        for generator in self.generators:
            for state, of_one in generator.stopwatch.lap().items():
                seconds[state] += of_one
        return dict(seconds)

    async def _wake(self) -> None:
        if self.serving:
            self.has_served, self.alone_since = True, None
        for generator in self.serving:  # while its door was closed the desk did not tell it
            generator.note_waiting(self.requests.keeps)
        self.requests.send_soon()
        async with self._changed:
            self._changed.notify_all()
