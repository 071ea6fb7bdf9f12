"""Generators that are synced together and hold the same version.

A generator joins its pool at a sync and serves once it is proved. It is evicted at its first
failure, and its half-written responses continue on another generator.
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from lrl.errors import GeneratorError, GeneratorTimeout, NoGenerators, RequestRejected
from lrl.generators.generator import Generator
from lrl.routing.dispatch import DispatchPolicy, Home, LeastLoaded, Request
from lrl.routing.migration import Migration
from lrl.routing.request_queue import RequestQueue
from lrl.types import Prompt, Rollout, Sampling

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
"""Seconds between two log lines of a run that waits for a generator."""

Prove = Callable[[Generator], Coroutine[Any, Any, Any]]
"""Compares a generator's log-probs with the policy's; raises GeneratorError if they disagree."""


class GeneratorPool:
    """Generators that hold the same version; dispatch is `LeastLoaded` by default. A run may be
    without any for `outage_timeout_s` seconds."""

    def __init__(
        self,
        generators: Sequence[Generator],
        dispatch: DispatchPolicy | None = None,
        migration: Migration | None = None,
        outage_timeout_s: float = math.inf,
    ) -> None:
        self.generators = list(generators)
        self.pending: list[Generator] = []
        """Generators that are ready and join at the next sync."""
        self.requests = RequestQueue(dispatch or LeastLoaded(), lambda: self.serving, migration)
        self.reissued = 0
        """Responses that continued on another generator after an eviction."""
        self.on_evicted: Callable[[Generator], None] = lambda generator: None
        """Called with each evicted generator."""
        self.syncing = False
        self.has_served = False
        """Whether any generator was ever proved."""
        self._outage_timeout_s = outage_timeout_s
        self._alone_since: float | None = None  # start of the outage, as a waiting trainer saw it
        self.last_loss = ""
        self._logged_at = 0.0
        self._changed = asyncio.Condition()

    @property
    def serving(self) -> list[Generator]:
        return [generator for generator in self.generators if generator.serving]

    @property
    def alive(self) -> list[Generator]:
        """The members that serve, are being proved, or take part in a sync."""
        return [one for one in self.generators if one.serving or one.in_proof or self.syncing]

    @property
    def capacity(self) -> int:
        """Responses that all members together write at once."""
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
        ended: Callable[[], None] = lambda: None,
        home: Home | None = None,
        spare: bool = False,
    ) -> None:
        """Writes every unfinished rollout to its end, in place, on the generator that the dispatch
        policy picks. If that fails, another one continues with the tokens so far; without any this
        waits.

        Args:
            prompt: The prompt of all of them.
            rollouts: They may have tokens already.
            sampling: Sampling settings.
            priority: Lower goes first.
            deadline_s: Seconds for a request, once it has a generator.
            due: The step that trains the responses, for dispatch.
            ended: Called at the end of each.
            home: The generator to prefer; it becomes the one that writes.
            spare: Whether to write in the spare slots, without waiting for rollouts.

        Raises:
            GeneratorError: The request itself is wrong, or takes longer than `deadline_s`.
        """
        target: Generator | None = None
        home = home or Home()
        while unfinished := [rollout for rollout in rollouts if not rollout.finished]:
            request = Request(
                prompt,
                unfinished,
                priority,
                due,
                home=home.generator,
                sampling=sampling,
                deadline_s=deadline_s,
                ended=ended,
            )
            if spare:
                home.generator = generator = await self._spare(home)
                await self._write(generator, request)
                continue
            home.generator = generator = await self.requests.enter(request, target)
            request.ended = partial(self._ended, generator, ended)
            try:
                if generator.serving:  # else it was paused, or left, since it was chosen
                    await self._write(generator, request)
            finally:
                target = self.requests.leave(generator, request)

    async def _spare(self, home: Home) -> Generator:
        """Returns a generator whose spare slots write now: not during a sync, which an evaluation
        may follow at once, and its responses must be of the new version."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.serving and not self.syncing)
        return min(self.serving, key=lambda one: (one is not home.generator, one.in_flight))

    def _ended(self, generator: Generator, ended: Callable[[], None]) -> None:
        self.requests.release(generator)
        ended()

    async def _write(self, generator: Generator, request: Request) -> None:
        """Writes on one generator; a failure evicts it and leaves rollouts unfinished."""
        try:
            await generator.write(request)
        except GeneratorTimeout as error:
            raise GeneratorTimeout(
                f"{error} Raise data.rollout_timeout_s, or lower data.max_response_tokens."
            ) from error
        except RequestRejected:
            raise
        except GeneratorError as error:
            self.evict(generator, str(error))
            self.reissued += len(request.unfinished)

    async def ask(self, route: str, body: dict[str, Any], *, deadline_s: float) -> Any:
        """Returns the JSON by which a generator answers a POST that needs no weights, so that a
        paused one can; one that fails is evicted, and another one is asked.

        Raises:
            GeneratorError: The request itself is wrong, or takes longer than `deadline_s`.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.generators)
            generator = min(self.generators, key=lambda one: one.in_flight)
            try:
                return await generator.client.post(route, body, deadline_s=deadline_s)
            except (RequestRejected, GeneratorTimeout):
                raise
            except GeneratorError as error:
                self.evict(generator, str(error))

    async def flush(self) -> None:
        await asyncio.gather(*(generator.flush() for generator in self.alive))

    def evict(self, generator: Generator, why: str) -> None:
        """Evicts a failed generator for good, and logs the end of its log; idempotent."""
        if generator.eviction is not None:
            return
        state = "is running" if generator.server.alive else "has ended"
        text = "%s is evicted: %s\nIts process %s. The end of its log:\n%s"
        log.warning(text, generator.name.capitalize(), why, state, generator.server.log_tail())
        self.last_loss = why
        self.remove(generator, why)
        self.on_evicted(generator)

    def remove(self, generator: Generator, why: str) -> None:
        """Removes a generator; its half-written responses continue on another one."""
        if generator.is_of_use(asyncio.get_running_loop().time()):
            self._alone_since = None  # also if the trainer has not looked since the outage before
        generator.evict(why)
        members = self.pending if generator in self.pending else self.generators
        members.remove(generator)

    async def admit_pending(self) -> None:
        """Begins a sync: pending generators become members."""
        self.syncing = True
        self.generators += self.pending
        self.pending.clear()

    async def finish_sync(self, failed: Mapping[Generator, str]) -> None:
        """Ends a sync and evicts the generators that failed it."""
        for generator, why in failed.items():
            self.evict(generator, why)
        self.syncing = False
        await self.wake()

    async def prove(self, generators: Sequence[Generator], prove: Prove) -> dict[Generator, str]:
        """Proves each of `generators`; evicts and returns those that failed, with the reason. None
        is evicted before the first one ever passed: the run is set up wrongly."""
        failed: dict[Generator, str] = {}

        async def prove_one(generator: Generator) -> None:
            try:
                await prove(generator)
            except GeneratorError as error:
                why = f"proof of weight version {generator.version} failed: {error}"
                failed[generator] = why
                if self.has_served:
                    self.evict(generator, why)
            else:
                generator.open()
                await self.wake()

        await asyncio.gather(*map(prove_one, generators))
        return failed

    async def lap(self) -> dict[str, float]:
        """Returns generator-seconds by activity since the last lap
        (`lrl.system.stopwatch.GENERATOR`)."""
        seconds = defaultdict[str, float](float)
        for generator in self.generators:
            for state, of_one in generator.stopwatch.lap().items():
                seconds[state] += of_one
        return dict(seconds)

    async def wake(self) -> None:
        """Sends what waits to the generators that serve."""
        if self.serving:
            self.has_served = True
        self.requests.send_soon()
        async with self._changed:
            self._changed.notify_all()

    def check_outage(self) -> None:
        """Logs an outage, which begins when no generator is left, and ends when one is of use
        again; raises NoGenerators when it has lasted too long. A run with replacements that only
        sync, fail their proof, or end at their first request once waited for a day."""
        now = time.monotonic()
        if any(generator.is_of_use(now) for generator in self.alive):
            self._alone_since = None
        elif self._alone_since is None and not self.alive and self.has_served:
            self._alone_since = now
        if self._alone_since is None or self.serving:
            return
        waited = now - self._alone_since
        if waited > self._outage_timeout_s:
            raise NoGenerators(
                f"No generator has served for {waited:.0f} s "
                f"(strategy.generator_timeout_s={self._outage_timeout_s:g}). The last one was lost "
                f"because: {self.last_loss}"
            )
        if now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            text = "No generator serves; waiting for a replacement for %.0f of %g s."
            log.warning(text, waited, self._outage_timeout_s)
