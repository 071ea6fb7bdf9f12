"""The calls of a sync to all generators: what ends them besides a generator's failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lrl.system.event_loop import LoopThread
from lrl.weights.pool_calls import PoolCalls
from tests.weights.model_sync import UPDATE, make_generators


def calls_of(loop: LoopThread, **settings: Any) -> PoolCalls:
    """The calls to two generators, one of which does not answer."""
    calls = PoolCalls(loop, **{"deadline_s": 5.0, "silence_s": 5.0} | settings)
    generators: Any = make_generators()
    generators[1].client.stuck = UPDATE
    calls.version = 3
    calls.begin(generators)
    return calls


def test_a_call_that_never_ends_names_itself_and_the_version(loop: LoopThread) -> None:
    async def endless(generator: object) -> None:
        await asyncio.sleep(300)

    # The loop adds 5 s to what the client is given.
    with pytest.raises(TimeoutError, match="/update_weights for weight version 3"):
        calls_of(loop, deadline_s=-4.9).each(UPDATE, endless)


def test_a_signal_ends_the_wait_for_a_phase(loop: LoopThread) -> None:
    def told() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calls_of(loop, interrupted=told).update(lambda one: {})
