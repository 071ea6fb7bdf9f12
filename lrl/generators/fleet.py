"""All generators of a run: started together, stopped together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from lrl.generators.crew import CONTROL_DEADLINE_S, Crew, Generator
from lrl.generators.loop import LoopThread
from lrl.generators.server import Server


class Fleet:
    """The generators of a run and the loop that talks to them.

    Args:
        servers: One per generator; the last `reserved` of them answer only evaluations.
        capacity: Answers a generator writes at once.
        reserved: How many generators are kept for evaluation at a pinned version.
    """

    def __init__(self, servers: Sequence[Server], *, capacity: int, reserved: int = 0) -> None:
        self.generators = [Generator(server, capacity) for server in servers]
        split = len(self.generators) - reserved
        self.rollouts = Crew(self.generators[:split])
        self.evaluation = Crew(self.generators[split:]) if reserved else None
        self.loop = LoopThread()

    @property
    def crews(self) -> list[Crew]:
        """The crew that writes rollouts, and the one for evaluation if there is one."""
        return [self.rollouts] if self.evaluation is None else [self.rollouts, self.evaluation]

    @property
    def alive(self) -> int:
        """Generators whose process runs."""
        return sum(generator.server.alive for generator in self.generators)

    def start(self, interrupted: Callable[[], None] | None = None) -> None:
        """Start all servers, wait until they answer, and name their weights version 0.

        Args:
            interrupted: Called now and then while waiting; raises to stop it.

        Raises:
            ServerError: A server did not come up. The caller owes `stop` in every case.
        """
        for generator in self.generators:
            generator.server.start()
        for generator in self.generators:
            generator.server.wait_ready(interrupted)
        for crew in self.crews:
            self.call(crew.post("/update_weight_version", {"new_version": "0"}), "naming the first version")

    def stop(self) -> None:
        """Close the connections, end the servers and the loop; idempotent."""
        try:
            if not self.loop.closed:
                self.call(self._disconnect(), "closing the connections to the generators")
                self.loop.close()
        finally:
            for generator in self.generators:
                generator.server.stop()

    def call(self, work: Any, what: str, deadline_s: float = CONTROL_DEADLINE_S) -> Any:
        """Run a coroutine on the fleet's loop and wait for it, from the trainer's thread."""
        return self.loop.wait(work, deadline_s, what)

    async def _disconnect(self) -> None:
        await asyncio.gather(*(generator.client.close() for generator in self.generators))
