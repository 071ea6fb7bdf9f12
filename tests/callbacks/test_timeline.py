"""The intervals of a generator's work; `Timeline` in a run is in tests/runs/test_async_run.py.

Covers callbacks/throughput.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from lrl.callbacks.timeline import INTERVAL_S, SAMPLE_S, WorkIntervals
from lrl.generators.generator import GeneratorStats
from lrl.generators.pool import GeneratorPool
from lrl.planning.clock import run
from lrl.rollouts.timeline import GeneratorRecord
from lrl.types import Rollout
from tests.generators.model_fleet import ask, gather, make_pool, request, resync


def looked_at(work: Callable[[GeneratorPool], Coroutine[Any, Any, Any]]) -> list[GeneratorRecord]:
    """Returns the intervals of a pool's first generator during `work`."""
    pool, _ = make_pool(8)
    records: list[GeneratorRecord] = []

    async def look() -> None:
        intervals = WorkIntervals(records.append)
        while True:
            intervals.add(asyncio.get_running_loop().time(), pool.generators[0].stats.snapshot())
            await asyncio.sleep(SAMPLE_S)

    async def scene() -> None:
        looking = asyncio.create_task(look())
        await work(pool)
        await asyncio.sleep(2.0)
        looking.cancel()

    run(scene())
    return records


def test_an_interval_has_its_tokens_responses_and_context() -> None:
    records = looked_at(lambda pool: gather([ask(pool, 3, 40), ask(pool, 2, 20, 1)]))
    assert 40 - INTERVAL_S - 0.3 < sum(record.seconds for record in records) < 40.3
    assert max(record.seconds for record in records) < 2 * INTERVAL_S + SAMPLE_S
    ends = list(itertools.accumulate(record.seconds for record in records))
    steady = [record for record, end in zip(records, ends, strict=True) if 2 < end < 19]
    assert all(record.responses == pytest.approx(5) for record in steady)
    assert sum(r.tokens for r in steady) == pytest.approx(5 * sum(r.seconds for r in steady), abs=5)
    for record, end in zip(records, ends, strict=True):
        if end - record.seconds > 21:
            assert record.responses == pytest.approx(3)
            # Prompts have one token; after t seconds a response has t.
            context = 3 * (end - record.seconds / 2)
            assert record.context_tokens == pytest.approx(context, rel=0.1)
    # The model client's first token comes after a second; its interval includes the prompts.
    assert sum(record.prefill_tokens for record in records[:3]) == 2
    assert sum(record.prefill_tokens for record in records) == 2


def test_intervals_exclude_pauses_and_idle_time() -> None:
    async def work(pool: GeneratorPool) -> None:
        writing = asyncio.create_task(ask(pool, 2, 20))
        await asyncio.sleep(5.5)
        await pool.generators[0].pause()
        await asyncio.sleep(10)
        await resync(pool, 1)
        await writing
        await asyncio.sleep(10)
        await ask(pool, 2, 3)

    records = looked_at(work)
    # 5.5 s before the pause, 4.3 s from the resume on, 3 s at the end; each loses less than a
    # token's second.
    most = 5.5 + 4.3 + 3
    assert most - 3 * (1 + SAMPLE_S) < sum(record.seconds for record in records) < most
    assert all(record.responses == pytest.approx(2, abs=0.2) for record in records)


def test_an_interval_has_the_tokens_of_its_time_though_those_of_a_second_come_together() -> None:
    """16 responses of 40 tokens a second; the first token of each comes at once, and every 0.4 s
    another one begins."""
    records: list[GeneratorRecord] = []
    intervals, stats = WorkIntervals(records.append), GeneratorStats()
    begun: list[tuple[int, Rollout]] = []
    stats.set_active(True, 0.0)
    for look in range(200):
        if look % 4 == 0:
            new = [Rollout() for _ in range(1 if look else 16)]
            for one in new:
                stats.begin(request(9, one))
            begun += [(look, one) for one in new]
        for began, rollout in begun:
            if look % 10 == 9 or not rollout.token_ids:
                rollout.token_ids += [1] * (1 + 4 * (look - began) - len(rollout.token_ids))
        intervals.add(look * SAMPLE_S, stats.snapshot())
    assert len(records) >= 8
    for record in records:
        assert record.tokens == pytest.approx(40 * record.responses * record.seconds, rel=0.1)
