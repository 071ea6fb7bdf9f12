"""`Timeline` on a real Trainer, policy and fleet, with given groups and idle generators.

Covers callbacks/throughput.py.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from lrl.advantages import GroupMean
from lrl.callbacks import Throughput, Timeline
from lrl.callbacks.timeline import INTERVAL_S, SAMPLE_S, WorkIntervals
from lrl.generators.fleet import Fleet
from lrl.generators.pool import GeneratorPool
from lrl.generators.stats import GeneratorStats, StatsSnapshot
from lrl.planning.clock import run
from lrl.policy import PolicyModule
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import StepLoader, StepStream
from lrl.rollouts.timeline import (
    GeneratorRecord,
    GroupRecord,
    MicroBatchRecord,
    Record,
    StepRecord,
    read,
)
from lrl.system.stopwatch import Stopwatch
from lrl.types import Group, Rollout
from tests.generators.model_fleet import ask, gather, make_pool, resync
from tests.rollouts.test_packing import make_group
from tests.run_without_generators import trainer

WAIT_S = 0.02


class Arriving(Learners):
    """Groups that arrive one by one, each a wait away."""

    def __init__(self, groups: list[Group], trained: list[Group]) -> None:
        self.coming = iter(groups)
        self.trained = trained

    def next_group(self, step: int) -> Group:
        time.sleep(WAIT_S)
        return next(self.coming)

    def give_up(self, group: Group) -> None:
        """Keeps no book."""

    def raise_if_stopped(self) -> None:
        """Nobody stops it."""

    def end_step(self, step: int, groups: Sequence[Group]) -> None:
        self.trained.extend(groups)


class Steps(L.LightningDataModule):
    """Two groups a step, each a wait away."""

    micro_batch_tokens = 32

    def __init__(self) -> None:
        super().__init__()
        self.stopwatch = Stopwatch()
        server: Any = SimpleNamespace(
            url="", name="", log_path=Path("log"), token="", trust=None, stop=lambda: None
        )
        self.fleet = Fleet([server], capacity=8)
        self.run = SimpleNamespace(
            fleet=self.fleet,
            stopwatch=self.stopwatch,
            calls=SimpleNamespace(controller=SimpleNamespace(generated_tokens=0)),
            syncs={},
            pause_seconds=0.0,
        )
        self.trained: list[Group] = []

    def train_dataloader(self) -> StepLoader:
        return StepLoader(100, self.next_step)

    def next_step(self) -> StepStream:
        assert self.trainer is not None
        step = self.trainer.global_step
        groups = [make_group(2 * step + place, 4, [9, 5 + step]) for place in range(2)]
        arriving = Arriving(groups, self.trained)
        self.run.step_stream = StepStream(
            step,
            2,
            source=arriving,
            policy=self.trainer.lightning_module,  # type: ignore[arg-type]
            learners=arriving,
            packer=Packer(self.micro_batch_tokens, GroupMean(), 1.0),
            stopwatch=self.stopwatch,
        )
        return self.run.step_stream


@pytest.fixture
def data() -> Iterator[Steps]:
    steps = Steps()
    yield steps
    steps.fleet.stop()


def fit(policy: Path, folder: Path, data: Steps, steps: int) -> list[Record]:
    running = trainer(folder, Throughput(), Timeline(), max_steps=steps, enable_checkpointing=False)
    running.fit(PolicyModule(str(policy)), datamodule=data)
    return read(folder / "timeline.jsonl")


def of(kind: type[Any], records: list[Record]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def test_a_steps_parts_add_up_to_its_seconds_and_every_trained_token_is_in_one_pass(
    policy_folder: Path, tmp_path: Path, data: Steps
) -> None:
    fit(policy_folder, tmp_path, data, steps=1)  # an older run in this folder
    data.trained.clear()
    records = fit(policy_folder, tmp_path, data, steps=3)
    kinds = (StepRecord, MicroBatchRecord, GroupRecord)
    steps, passes, groups = (of(kind, records) for kind in kinds)
    assert [step.step for step in steps] == [0, 1, 2] and isinstance(records[-1], StepRecord)
    for step, before in zip(steps[1:], steps, strict=False):
        assert step.started_s == pytest.approx(before.started_s + before.seconds)
    for step in steps:
        parts = [step.wait_first_s, step.wait_last_s, step.train_s, step.update_s, step.other_s]
        nothing = {step.sync_s, step.pause_s, step.wait_more_s, step.wait_reward_s}
        assert min(parts) > 0 and nothing == {0.0}
        assert sum(parts) == pytest.approx(step.seconds)
        assert min(step.wait_first_s, step.wait_last_s) >= WAIT_S
    pairs = [(group.prompt, one) for group in data.trained for one in group.rollouts]
    lengths = [len(prompt.token_ids) + len(one.token_ids) for prompt, one in pairs]
    assert sum(one.tokens for one in passes) == sum(lengths)
    assert sum(one.tokens_squared for one in passes) == sum(length**2 for length in lengths)
    assert sum(one.seconds for one in passes) == pytest.approx(sum(step.train_s for step in steps))
    assert [group.index for group in groups] == list(range(6)) and groups[-1].lengths == [9, 7]
    assert sum(step.tokens for step in steps) == sum(sum(group.lengths) for group in groups)


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


def seen(since: float | None, written: int, up_to_date: bool) -> StatsSnapshot:
    return StatsSnapshot(since, written, up_to_date, read=0, responses=1, context_tokens=9)


def test_every_interval_has_new_tokens_and_waiting_for_them_is_part_of_it() -> None:
    records: list[GeneratorRecord] = []
    intervals = WorkIntervals(records.append)
    for now in (0.0, 0.5, 1.0, 1.5, 2.0):  # a long prefill
        intervals.add(now, seen(0.0, 0, False))
    intervals.add(2.5, seen(0.0, 16, True))
    for now in (3.0, 3.4):  # the next chunk comes at the same moment as the break
        intervals.add(now, seen(0.0, 16, False))
    intervals.add(3.5, seen(None, 32, True))
    assert [(record.seconds, record.tokens) for record in records] == [(pytest.approx(2.5), 16)]


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
            stats.begin(9, [[one] for one in new])
            begun += [(look, one) for one in new]
        for began, rollout in begun:
            if look % 10 == 9 or not rollout.token_ids:
                rollout.token_ids += [1] * (1 + 4 * (look - began) - len(rollout.token_ids))
        intervals.add(look * SAMPLE_S, stats.snapshot())
    assert len(records) >= 8
    for record in records:
        assert record.tokens == pytest.approx(40 * record.responses * record.seconds, rel=0.1)
