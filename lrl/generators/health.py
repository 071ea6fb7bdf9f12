"""Health of generators: the heartbeat of each one, and the limit on an outage of all.

A heartbeat is a token from a generator; a silent generator gets a request for one. The route
/health would not do: the API server answers it even while the engine stands still (a frozen
process, a kernel that never returns).
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lrl.errors import GeneratorError, NoGenerators
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool

log = logging.getLogger(__name__)

POLL_S = 1.0
"""The longest time until an idle generator's dead process is noticed."""
LOG_EVERY_S = 5.0
"""Seconds between two log lines of a run that waits for a generator."""


async def monitor(pool: GeneratorPool, generator: Generator, heartbeat_s: float) -> None:
    """Evicts `generator` when its process ends, or when it sends no token within `heartbeat_s`
    after a request for one.

    A paused generator sends none; the phases of a sync have deadlines of their own.
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
                await generator.client.heartbeat(heartbeat_s)
                answered_at = clock()
            except GeneratorError as error:
                if generator.pauses == pauses:  # a sync may have paused it meanwhile
                    pool.evict(generator, f"No heartbeat: {error}")


@dataclass
class OutageLimit:
    """The limit on an outage.

    An outage begins when no generator is left, and ends when one is of use again. A replacement
    that only syncs, fails its proof, or ends at its first request does not end it: with such ones a
    run once waited for a day.
    """

    seconds: float
    logs: Sequence[Path]
    """The servers', for the error."""
    _logged_at: float = field(init=False, default=0.0)

    def check_outage(self, pool: GeneratorPool) -> None:
        """Logs an outage of `pool`, at most every `LOG_EVERY_S` seconds; raises NoGenerators at the
        limit."""
        now = time.monotonic()
        if any(generator.is_of_use(now) for generator in pool.alive):
            pool.alone_since = None
        elif pool.alone_since is None and not pool.alive and pool.has_served:
            pool.alone_since = now
        if pool.alone_since is None or pool.serving:
            return
        waited = now - pool.alone_since
        if waited > self.seconds:
            raise NoGenerators(
                f"No generator has served for {waited:.0f} s "
                f"(strategy.generator_timeout_s={self.seconds:g}). The last one was lost because: "
                f"{pool.last_loss}\nTheir logs: {', '.join(map(str, self.logs))}"
            )
        if now - self._logged_at > LOG_EVERY_S:
            self._logged_at = now
            log.warning(
                "No generator serves; waiting for a replacement for %.0f of %g s.",
                waited,
                self.seconds,
            )
