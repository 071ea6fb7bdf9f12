"""The fleet: starts, monitors, replaces and stops a run's generators; generators of other processes
join and leave.

`JobSupervisor` keeps the run's own generators alive, and what a launcher starts.
"""

import asyncio
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from lrl.errors import GeneratorError, NotRunning, ServerError
from lrl.generators.generator import CONTROL_DEADLINE_S, Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.server import Server
from lrl.routing.dispatch import DispatchPolicy
from lrl.routing.migration import Migration
from lrl.system.event_loop import LoopThread, cancel_all

log = logging.getLogger(__name__)

POLL_S = 1.0
"""The longest time until an idle generator's dead process is noticed."""
JOB_POLL_S = 0.2
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
STABLE_S = 60.0
"""A job that served so long before it failed is started again without a longer pause."""


class JobState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    """It must be ended and started again."""
    LEFT = "left"
    """It has left at a request, so it is not started again."""


class Condition(NamedTuple):
    state: JobState
    why: str = ""


class SupervisedJob(ABC):
    """A job that is started again when it fails. Its methods are called on one thread, which
    outlives it."""

    name: str
    """For the log."""
    running = False
    failures = 0
    """Since it last served for long."""
    why = ""
    """The reason of the last failure."""
    failed_at = 0.0
    _next_start = 0.0
    _serving_since = math.inf

    @abstractmethod
    def start(self) -> None:
        """Starts it; raises OSError or NotRunning if that is not possible now."""

    @abstractmethod
    def condition(self) -> Condition:
        """Returns its state; called between `start` and `end`."""

    @abstractmethod
    def end(self) -> None:
        """Ends it, also if it hangs; does nothing if it does not run. Idempotent."""

    def poll(self) -> None:
        """Starts it if it is time, or looks at it."""
        if self.running:
            state, why = self.condition()
            if state is JobState.SERVING:
                self._serving_since = min(self._serving_since, time.monotonic())
            elif state is not JobState.STARTING:
                self.end()
                self.running = False
                self._next_start = math.inf
                if state is JobState.FAILED:
                    self._failed(why)
        elif time.monotonic() >= self._next_start:
            self._serving_since = math.inf
            try:
                self.start()
                self.running = True
            except (OSError, NotRunning) as error:
                self._failed(f"it cannot be started: {error}")

    def _failed(self, why: str) -> None:
        """Decides when the next attempt is due."""
        now = time.monotonic()
        if now - self._serving_since > STABLE_S:
            self.failures = 0
        pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**self.failures)
        log.warning("%s is replaced in %g s: %s", self.name.capitalize(), pause_s, why)
        self.why = why
        self.failed_at = now
        self._next_start = now + pause_s
        self.failures += 1


class JobSupervisor:
    """Keeps jobs running from `start` to `stop`, each on a thread of its own: one that is slow to
    start or to end delays no other."""

    def __init__(self, jobs: Sequence[SupervisedJob]) -> None:
        self.jobs = jobs
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begins to start and watch the jobs."""
        for index, job in enumerate(self.jobs):
            name = f"lrl-jobs-{index}"
            thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends all jobs, all at once, and waits for their end. Idempotent."""
        self._over.set()
        for job in () if self._threads else self.jobs:
            job.end()
        for thread in self._threads:
            thread.join()

    def _run(self, job: SupervisedJob) -> None:
        try:
            while not self._over.wait(JOB_POLL_S):
                job.poll()
        except Exception:
            log.exception("Watching %s failed; it will not be replaced.", job.name)
            self._over.wait()
        finally:
            job.end()


class Fleet:
    """The generators of a run.

    Args:
        servers: One per generator; the last `reserved` of them serve only evaluations.
        loop: Runs their clients; `stop` cancels all its work.
        capacity: Responses that a generator writes at once.
        heartbeat_s: Seconds of silence before a heartbeat request, and that request's deadline.
        outage_timeout_s: Seconds that a run waits when no generator is left.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        loop: LoopThread,
        *,
        capacity: int,
        reserved: int = 0,
        heartbeat_s: float = 30.0,
        outage_timeout_s: float = 900.0,
        dispatch: DispatchPolicy | None = None,
        migration: Migration | None = None,
    ) -> None:
        self.generators = [Generator(server, capacity) for server in servers]
        split = len(self.generators) - reserved
        pool_of = partial(GeneratorPool, outage_timeout_s=outage_timeout_s)
        self.rollouts = pool_of(self.generators[:split], dispatch, migration)
        self.evaluation = pool_of(self.generators[split:]) if reserved else None
        # Lost ones' too: a sync may still use one.
        self._clients = [one.client for one in self.generators]
        self.loop = loop
        self.capacity = capacity
        self.heartbeat_s = heartbeat_s
        self.restarts = 0
        """Generators that were replaced and answer again."""
        self.joined = 0
        """Generators of other processes that have served."""
        self.left = 0
        """Generators that have served and are not replaced: removed ones, and lost ones of other
        processes."""
        self._jobs = [
            _ServerJob(self, self.pools[index >= split], self.generators[index], server)
            for index, server in enumerate(servers)
        ]
        self._supervisor = JobSupervisor(self._jobs)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pools(self) -> list[GeneratorPool]:
        return [self.rollouts] if self.evaluation is None else [self.rollouts, self.evaluation]

    @property
    def alive(self) -> int:
        return sum(len(pool.alive) for pool in self.pools)

    @property
    def reissued(self) -> int:
        return sum(pool.reissued for pool in self.pools)

    @property
    def moved(self) -> int:
        return sum(pool.requests.moved for pool in self.pools)

    def start(self, interrupted: Callable[[], None] = lambda: None) -> None:
        """Starts all servers, waits until they are ready, and begins to monitor them; call `stop`
        also after its ServerError. Calls `interrupted`, which may raise, at every poll."""
        servers = [job.server for job in self._jobs]
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready(interrupted)
        longest = max((server.settings.start_timeout_s for server in servers), default=0.0)
        self.call(self._begin(), "warming the generators up", longest + 5.0)
        self._supervisor.start()

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine on the fleet's loop, from another thread; its error is logged."""
        self.loop.loop.call_soon_threadsafe(self._spawn, work)

    def stop(self) -> None:
        """Closes the connections and ends the servers; idempotent."""
        try:
            self.call(self._disconnect(), "closing the connections to the generators")
        finally:
            self._supervisor.stop()

    async def admit(self, generator: Generator, job: "_ServerJob | None" = None) -> None:
        """Admits a generator, which joins at the next sync: of another process, or of `job`, whose
        server was started again. Raises GeneratorError if it is silent."""
        self._clients.append(generator.client)
        await answer_of(generator, generator.server.settings.start_timeout_s)
        if job is None:
            self.generators.append(generator)
        else:
            self.generators[self.generators.index(job.generator)] = generator
            job.generator = generator
            self.restarts += 1
        pool = self.rollouts if job is None else job.pool
        pool.pending.append(generator)
        self._spawn(monitor(pool, generator, self.heartbeat_s))

    async def remove(self, generator: Generator) -> None:
        """Removes a generator; its responses continue elsewhere. A server of the run's own is
        stopped."""
        log.info("%s leaves the run.", generator.name.capitalize())
        generator.drain()
        await generator.flush()
        if generator.eviction is not None:  # it has failed meanwhile, and is treated as lost
            return
        job = self._job_of(generator)
        if job is not None:
            job.has_left = True
        self.rollouts.remove(generator, f"{generator.name} has left the run.")
        await self._forget(generator)
        if job is not None:
            await asyncio.to_thread(job.end)

    def call(self, work: Any, purpose: str, deadline_s: float = CONTROL_DEADLINE_S) -> Any:
        """Runs a coroutine on the fleet's loop and waits for it, from the trainer's thread."""
        return self.loop.wait(work, deadline_s, purpose)

    async def _begin(self) -> None:
        await asyncio.gather(*(job.first_answer() for job in self._jobs))
        for pool in self.pools:
            pool.on_evicted = lambda generator: self._spawn(self._close(generator))
            for generator in pool.generators:
                self._spawn(monitor(pool, generator, self.heartbeat_s))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("Monitoring the generators failed; one may not be replaced.", exc_info=error)

    def _job_of(self, generator: Generator) -> "_ServerJob | None":
        return next((job for job in self._jobs if job.generator is generator), None)

    async def _forget(self, generator: Generator) -> None:
        self.generators.remove(generator)
        self.left += generator.served_from is not None
        await generator.client.close()

    async def _close(self, lost: Generator) -> None:
        """Closes a lost generator, which its job replaces; forgets another process's."""
        if self._job_of(lost) is None:
            await self._forget(lost)
        else:
            await lost.client.close()

    async def _disconnect(self) -> None:
        # First, or a request that still reads takes the end of its connection for the end of the
        # generator: a run that was stopped then said that it evicts one, below its last words.
        await cancel_all()
        await asyncio.gather(*(client.close() for client in self._clients))


@dataclass(eq=False)
class _ServerJob(SupervisedJob):
    """A server of the run, and the generator that it is at present."""

    running = True  # the fleet starts the first one
    fleet: Fleet
    pool: GeneratorPool
    generator: Generator
    server: Server
    has_left: bool = False
    _replaced: Generator | None = None  # the one whose server was started again
    _replacement: Future[None] | None = None

    def __post_init__(self) -> None:
        self.name = self.server.name

    def start(self) -> None:
        self._replaced = self.generator
        self._replacement = None
        self.server.start()

    def condition(self) -> Condition:
        generator = self.generator
        eviction = generator.eviction  # before `has_left`: a leave sets that first
        if self.has_left:
            return Condition(JobState.LEFT)
        if generator is self._replaced:
            return self._starting()
        if eviction is not None:
            return Condition(JobState.FAILED, eviction)
        return Condition(JobState.STARTING if generator.served_from is None else JobState.SERVING)

    def _starting(self) -> Condition:
        """Has the fleet admit the server once it answers."""
        try:
            if self._replacement is None and self.server.ready():
                replacement = Generator(self.server, self.fleet.capacity)
                self._replacement = self.fleet.loop.submit(self.fleet.admit(replacement, self))
            elif (done := self._replacement) and done.done() and not done.cancelled():
                done.result()
        except (ServerError, GeneratorError, OSError) as error:
            return Condition(JobState.FAILED, str(error))
        return Condition(JobState.STARTING)

    async def first_answer(self) -> None:
        """Warms the generator up, whose engine computes here for the first time: that took 18 s
        with cold caches, which would delay the first sync."""
        try:
            await answer_of(self.generator, self.server.settings.start_timeout_s)
        except GeneratorError as error:  # it only points at a cause in the log
            raise self.server.error("has started, and its first request failed") from error

    def end(self) -> None:
        self.server.stop()


async def answer_of(generator: Generator, deadline_s: float) -> None:
    """Returns once a generator has answered; raises GeneratorError if it does not."""
    await generator.client.prompt_logprobs([0, 0], salt="heartbeat", deadline_s=deadline_s)


async def monitor(pool: GeneratorPool, generator: Generator, heartbeat_s: float) -> None:
    """Evicts `generator` when its process ends, or when it sends no token within `heartbeat_s` of
    a request for one.

    Not by the route /health: the API server answers it even while the engine stands still (a frozen
    process, a kernel that never returns). A paused generator sends no token; the phases of a sync
    have deadlines of their own.
    """
    clock = asyncio.get_running_loop().time
    answered_at = 0.0
    while generator.eviction is None:
        await asyncio.sleep(min(POLL_S, heartbeat_s))
        if not generator.server.alive and generator.eviction is None:
            pool.evict(generator, f"{generator.name}: its process has ended.")
        elif (
            generator.serving
            and clock() - max(answered_at, generator.client.last_token_at) > heartbeat_s
        ):
            pauses = generator.pauses
            try:
                await answer_of(generator, heartbeat_s)
                answered_at = clock()
            except GeneratorError as error:
                if generator.pauses == pauses:  # a sync may have paused it meanwhile
                    pool.evict(generator, f"No heartbeat: {error}")
