"""How long a run waits when none of its generators is left, and what it says meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from lrl.generators.crew import Crew

log = logging.getLogger(__name__)

SAY_S = 5.0
"""How often a run that waits for a generator says so."""


class NoGenerators(RuntimeError):
    """No generator came back in the time that the run may wait for one."""


class Patience:
    """Ends a run that has waited too long for a generator.

    Args:
        seconds: How long it may wait.
        logs: Of the servers, for the error.
    """

    def __init__(self, seconds: float, logs: Sequence[Path]) -> None:
        self.seconds = seconds
        self._logs = logs
        self._said = 0.0

    def expect_one(self, crew: Crew) -> None:
        """Say every few seconds that a crew has no generator left, if so; for the looks of a waiting trainer.

        Raises:
            NoGenerators: There has been none for so long.
        """
        now = time.monotonic()
        if crew.alive or not crew.has_served:
            crew.alone_since = None
            return
        crew.alone_since = crew.alone_since or now
        waited = now - crew.alone_since
        if waited > self.seconds:
            raise NoGenerators(
                f"No generator has served for {waited:.0f} s (strategy.generator_timeout_s={self.seconds:g}). The last "
                f"one was lost because: {crew.last_loss}\nTheir logs: {', '.join(map(str, self._logs))}"
            )
        if now - self._said > SAY_S:
            self._said = now
            log.warning("No generator is left; waiting for a replacement for %.0f of %g s.", waited, self.seconds)
