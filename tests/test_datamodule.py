"""Reads of the loop's state by the data module, from the trainer's thread."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from lrl.datamodule import RolloutDataModule
from lrl.generators.fleet import Fleet
from lrl.types import Rollout


class InARun(RolloutDataModule):
    """A data module whose strategy has this fleet."""

    def __init__(self, fleet: Fleet | None) -> None:
        super().__init__([{"prompt": "1+1="}], rewards="tests.odd_lengths:brevity")
        self.trainer: Any = SimpleNamespace(strategy=SimpleNamespace(fleet=fleet))


async def write(rollout: Rollout) -> None:
    """Tokens without end; each takes a while to be written whole."""
    while True:
        rollout.token_ids.append(1)
        time.sleep(0.001)
        rollout.logprobs.append(-1.0)
        await asyncio.sleep(0)


def lengths(rollout: Rollout) -> tuple[int, int]:
    return len(rollout.token_ids), len(rollout.logprobs)


def test_a_read_on_the_loop_sees_no_half_written_rollout() -> None:
    fleet, rollout = Fleet([], capacity=1), Rollout()
    data = InARun(fleet)
    fleet.loop.submit(write(rollout))
    try:
        read = [data._on_the_loop(lambda: lengths(rollout), "reading") for _ in range(30)]
    finally:
        fleet.stop()
    assert all(tokens == logprobs for tokens, logprobs in read) and read[-1] > read[0]
    assert data._on_the_loop(lambda: lengths(rollout), "reading") >= read[-1]  # behind the loop's end, too


def test_without_a_fleet_the_read_runs_on_the_calling_thread() -> None:
    assert InARun(None)._on_the_loop(lambda: 3, "reading") == 3
