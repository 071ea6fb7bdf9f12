"""Health of generators: the heartbeat of each, and the deadline of a run that has none left.

A heartbeat is a token that a generator sends. One that has sent none for a while is asked for one. The route /health
would not do: the API server answers it also while the engine behind it stands still (a frozen process, a kernel that
never returns).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from lrl.generators.client import GeneratorError
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool

LOOK_S = 1.0
"""How often a process that has ended is noticed, should nothing be asked of it."""


async def watch(pool: GeneratorPool, generator: Generator, heartbeat_s: float) -> None:
    """Take `generator` out of its pool when its process ends, or when it sends no token in `heartbeat_s` seconds.

    A paused generator sends none; the phases of a sync have deadlines of their own.
    """
    while generator.eviction is None:
        await asyncio.sleep(min(LOOK_S, heartbeat_s))
        if not generator.server.alive and generator.eviction is None:
            pool.evict(generator, f"{generator.name}: its process has ended.")
            break
        silent_s = asyncio.get_running_loop().time() - generator.client.heard_at
        if generator.serving and silent_s > heartbeat_s:
            await _ask(pool, generator, heartbeat_s)


async def _ask(pool: GeneratorPool, generator: Generator, heartbeat_s: float) -> None:
    pauses = generator.pauses
    try:
        await generator.client.heartbeat(heartbeat_s)
        generator.client.heard_at = asyncio.get_running_loop().time()
    except GeneratorError as error:
        if generator.pauses == pauses:  # else it was told to stand still meanwhile
            pool.evict(generator, f"No heartbeat: {error}")


log = logging.getLogger(__name__)

SAY_S = 5.0
"""How often a run that waits for a generator says so."""


class NoGenerators(RuntimeError):
    """No generator came back in the time that the run may wait for one."""


class OutageLimit:
    """Ends a run that has waited too long for a generator.

    Args:
        seconds: How long it may wait.
        logs: Of the servers, for the error.
    """

    def __init__(self, seconds: float, logs: Sequence[Path]) -> None:
        self.seconds = seconds
        self._logs = logs
        self._said = 0.0

    def check_outage(self, pool: GeneratorPool) -> None:
        """Say every few seconds that a pool has no generator left, if so; for the looks of a waiting trainer.

        Raises:
            NoGenerators: There has been none for so long.
        """
        now = time.monotonic()
        if pool.alive or not pool.has_served:
            pool.alone_since = None
            return
        pool.alone_since = pool.alone_since or now
        waited = now - pool.alone_since
        if waited > self.seconds:
            raise NoGenerators(
                f"No generator has served for {waited:.0f} s (strategy.generator_timeout_s={self.seconds:g}). The last "
                f"one was lost because: {pool.last_loss}\nTheir logs: {', '.join(map(str, self._logs))}"
            )
        if now - self._said > SAY_S:
            self._said = now
            log.warning("No generator is left; waiting for a replacement for %.0f of %g s.", waited, self.seconds)
