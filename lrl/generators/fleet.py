"""All generators of a run: started together, watched, replaced one by one, stopped together; others join and leave."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from lrl.generators.client import GeneratorError
from lrl.generators.generator import CONTROL_DEADLINE_S, Generator
from lrl.generators.health import OutageLimit, watch
from lrl.generators.pool import GeneratorPool
from lrl.generators.server import POLL_S, Server, ServerError
from lrl.runtime.cpu_affinity import CpuPinning
from lrl.runtime.event_loop import LoopThread

log = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
PROVEN_S = 60.0
"""A generator that served so long before it was lost is replaced without a longer backoff."""


class Fleet:
    """The generators of a run and the loop that talks to them.

    Args:
        servers: One per generator; the last `reserved` of them answer only evaluations.
        capacity: Answers a generator writes at once.
        reserved: How many generators are kept for evaluation at a pinned version.
        heartbeat_s: Seconds of silence after which a generator is asked for a token, and seconds it has for that.
        patience_s: Seconds a run waits when no generator is left.
        cores: What the servers and the loop keep to while the trainer computes; none lets them go anywhere.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        capacity: int,
        reserved: int = 0,
        heartbeat_s: float = 30.0,
        patience_s: float = 900.0,
        cores: Collection[int] = (),
    ) -> None:
        self.generators = [Generator(server, capacity) for server in servers]
        split = len(self.generators) - reserved
        self.rollouts = GeneratorPool(self.generators[:split])
        self.evaluation = GeneratorPool(self.generators[split:]) if reserved else None
        self._clients = [one.client for one in self.generators]  # lost ones' too: a sync may still be talking to one
        self.loop = LoopThread()
        self._pinning = CpuPinning(cores, self.loop.thread)
        self.loop.long_wait = self._pinning.open
        self.capacity = capacity
        self.heartbeat_s = heartbeat_s
        self.patience = OutageLimit(patience_s, [server.log_path for server in servers])
        self.restarts = 0
        """Generators that were replaced and answer again."""
        self.joined = 0
        """Generators of other processes that have served."""
        self.left = 0
        """Generators that have served and are not replaced: they were let go, or were another process's."""
        self._servers = list(servers)
        self._backoffs: Counter[int] = Counter()  # number of a server -> its replacements since it last served for long
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def pools(self) -> list[GeneratorPool]:
        """The pool that writes rollouts, and the one for evaluation if there is one."""
        return [self.rollouts] if self.evaluation is None else [self.rollouts, self.evaluation]

    @property
    def alive(self) -> int:
        """See `GeneratorPool.alive`."""
        return sum(len(pool.alive) for pool in self.pools)

    @property
    def reissued(self) -> int:
        """Responses that went on with another generator than the one that began them."""
        return sum(pool.reissued for pool in self.pools)

    @property
    def moved(self) -> int:
        """Responses that went on with an idle generator."""
        return sum(pool.requests.moved for pool in self.pools)

    def start(self, interrupted: Callable[[], None] | None = None) -> None:
        """Start all servers, wait until they answer, and begin to watch them.

        Args:
            interrupted: Called now and then while waiting; raises to stop it.

        Raises:
            ServerError: A server did not come up. The caller owes `stop` in every case.
        """
        for server in self._servers:
            server.start()
        for server in self._servers:
            server.wait_ready(interrupted)
        longest = max(server.settings.start_timeout_s for server in self._servers)
        self.call(self._begin(), "warming the generators up", longest + 5.0)
        for server in self._servers:
            self._pinning.set_processes(server.number, server.processes())
        self._pinning.keep()

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine on the fleet's loop until the fleet stops; from another thread. Its error is logged."""
        self.loop.loop.call_soon_threadsafe(self._keep, work)

    @property
    def first_server(self) -> Server:
        """The first server of the run's own; all have the same settings and token."""
        return self._servers[0]

    def stop(self) -> None:
        """Close the connections, end the servers and the loop; idempotent."""
        self._stopping = True
        self.loop.interrupted = None
        try:
            if not self.loop.closed:
                self.call(self._disconnect(), "closing the connections to the generators")
                self.loop.close()
        finally:
            for server in self._servers:
                server.stop()

    async def admit(self, newcomer: Generator) -> None:
        """Take in a generator that answers: it joins at the next sync. Raises GeneratorError if it does not answer."""
        self._clients.append(newcomer.client)
        await _warm_up(newcomer)
        self.generators.append(newcomer)
        self.rollouts.pending.append(newcomer)
        self._keep(watch(self.rollouts, newcomer, self.heartbeat_s))

    async def remove(self, generator: Generator) -> None:
        """Take out a generator that is to leave; what it writes goes on elsewhere. Its process ends if it is ours."""
        log.info("%s leaves the run.", generator.name.capitalize())
        self.rollouts.remove(generator, f"{generator.name} has left the run.")
        await self._forget(generator)
        if (server := self._own(generator)) is not None:
            await asyncio.to_thread(server.stop)

    def call(self, work: Any, what: str, deadline_s: float = CONTROL_DEADLINE_S) -> Any:
        """Run a coroutine on the fleet's loop and wait for it, from the trainer's thread."""
        return self.loop.wait(work, deadline_s, what)

    async def _begin(self) -> None:
        await asyncio.gather(*(_warm_up(generator) for generator in self.generators))
        for pool in self.pools:
            pool.on_evicted = lambda generator, pool=pool: self._keep(self._lose(pool, generator))  # type: ignore[misc]
            for generator in pool.generators:
                self._keep(watch(pool, generator, self.heartbeat_s))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("Watching the generators failed; one may stay out.", exc_info=error)

    async def _lose(self, pool: GeneratorPool, lost: Generator) -> None:
        """Replace a generator of the run's own; another process's is its own to start again."""
        if (server := self._own(lost)) is not None:
            await self._replace(pool, lost, server)
        else:
            await self._forget(lost)

    def _own(self, generator: Generator) -> Server | None:
        """Its server, if this run has started it."""
        return next((server for server in self._servers if server is generator.server), None)

    async def _forget(self, gone: Generator) -> None:
        self.generators.remove(gone)
        self.left += gone.served_from is not None
        await gone.client.close()

    async def _replace(self, pool: GeneratorPool, lost: Generator, server: Server) -> None:
        """Start the server of a lost generator until it answers again; the next sync takes it in."""
        await lost.client.close()
        if lost.served_from and asyncio.get_running_loop().time() - lost.served_from > PROVEN_S:
            self._backoffs[server.number] = 0
        newcomer = Generator(server, lost.capacity)
        self._clients.append(newcomer.client)
        while not self._stopping:
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** self._backoffs[server.number]))
            self._backoffs[server.number] += 1
            try:
                await self._start(server, newcomer)
                break
            except (ServerError, GeneratorError, OSError) as error:
                log.warning("The replacement of %s failed: %s", server.name, error)
        self.generators[self.generators.index(lost)] = newcomer
        pool.pending.append(newcomer)
        self.restarts += 1
        self._keep(watch(pool, newcomer, self.heartbeat_s))

    async def _start(self, server: Server, generator: Generator) -> None:
        """Start a server and wait until it answers."""
        server.start()
        while not await asyncio.to_thread(server.ready):
            await asyncio.sleep(POLL_S)
        await _warm_up(generator)
        self._pinning.set_processes(server.number, server.processes())

    async def _disconnect(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(client.close() for client in self._clients))


async def _warm_up(generator: Generator) -> None:
    """A small probe. The first request to a fresh server took 18 s with cold caches, and no sync waits for that."""
    deadline_s = generator.server.settings.start_timeout_s
    await generator.client.prompt_logprobs([0, 0], salt="warm-up", deadline_s=deadline_s)
