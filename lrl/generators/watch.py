"""The heartbeat of a generator: a token it sends, or, when it has sent none for a while, one that it is asked for.

A token and not /health: that route answers from the API server alone, also while the engine behind it stands still
(a frozen process, a kernel that never returns).
"""

from __future__ import annotations

import asyncio

from lrl.generators.client import GeneratorError
from lrl.generators.crew import Crew
from lrl.generators.generator import Generator

LOOK_S = 1.0
"""How often a process that has ended is noticed, should nothing be asked of it."""


async def watch(crew: Crew, generator: Generator, heartbeat_s: float) -> None:
    """Take `generator` out of its crew when its process ends, or when it sends no token in `heartbeat_s` seconds.

    A paused generator sends none; the phases of a sync have deadlines of their own.
    """
    while generator.out is None:
        await asyncio.sleep(min(LOOK_S, heartbeat_s))
        if not generator.server.alive and generator.out is None:
            crew.take_out(generator, f"{generator.name}: its process has ended.")
            break
        silent_s = asyncio.get_running_loop().time() - generator.client.heard_at
        if generator.open and silent_s > heartbeat_s:
            await _ask(crew, generator, heartbeat_s)


async def _ask(crew: Crew, generator: Generator, heartbeat_s: float) -> None:
    pauses = generator.pauses
    try:
        await generator.client.heartbeat(heartbeat_s)
        generator.client.heard_at = asyncio.get_running_loop().time()
    except GeneratorError as error:
        if generator.pauses == pauses:  # else it was told to stand still meanwhile
            crew.take_out(generator, f"No heartbeat: {error}")
