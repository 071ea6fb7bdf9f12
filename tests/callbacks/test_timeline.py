"""`Timeline` on a real Trainer, policy and fleet, with given groups and idle generators.

Covers callbacks/throughput.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lrl.advantages import GroupMean
from lrl.callbacks import Throughput, Timeline
from lrl.generators.fleet import Fleet
from lrl.planning.profiling.timeline import GroupRecord, MicroBatchRecord, Record, StepRecord, read
from lrl.policy import PolicyModule
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import GroupSource, StepLoader, StepStream
from lrl.system.stopwatch import Stopwatch
from lrl.types import Group
from tests.rollouts.test_packing import make_group
from tests.run_without_generators import trainer

WAIT_S = 0.02


class Arriving(GroupSource, Learners):
    """Groups that arrive one by one, each a wait away."""

    def __init__(self, groups: list[Group], trained: list[Group]) -> None:
        self.coming = iter(groups)
        self.trained = trained

    def next_group(self, step: int) -> Group:
        time.sleep(WAIT_S)
        return next(self.coming)

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
        self.controller = SimpleNamespace(generated_tokens=0)
        self.trained: list[Group] = []

    def train_dataloader(self) -> StepLoader:
        return StepLoader(100, self.next_step)

    def next_step(self) -> StepStream:
        assert self.trainer is not None
        step = self.trainer.global_step
        groups = [make_group(2 * step + place, 4, [9, 5 + step]) for place in range(2)]
        arriving = Arriving(groups, self.trained)
        self.step_stream = StepStream(
            step,
            2,
            source=arriving,
            policy=self.trainer.lightning_module,  # type: ignore[arg-type]
            learners=arriving,
            packer=Packer(self.micro_batch_tokens, GroupMean(), 1.0),
            stopwatch=self.stopwatch,
        )
        return self.step_stream


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
    records = fit(policy_folder, tmp_path, data, steps=3)
    steps, passes, groups = (
        of(StepRecord, records),
        of(MicroBatchRecord, records),
        of(GroupRecord, records),
    )
    assert [step.step for step in steps] == [0, 1, 2] and isinstance(records[-1], StepRecord)
    for step, before in zip(steps[1:], steps, strict=False):
        assert step.started_s == pytest.approx(before.started_s + before.seconds)
    for step in steps:
        parts = [step.wait_first_s, step.wait_last_s, step.train_s, step.update_s, step.other_s]
        assert (
            min(parts) > 0 == step.sync_s == step.pause_s == step.wait_more_s == step.wait_reward_s
        )
        assert sum(parts) == pytest.approx(step.seconds)
        assert min(step.wait_first_s, step.wait_last_s) >= WAIT_S
    lengths = [
        len(group.prompt.token_ids) + len(one.token_ids)
        for group in data.trained
        for one in group.rollouts
    ]
    assert sum(one.tokens for one in passes) == sum(lengths)
    assert sum(one.tokens_squared for one in passes) == sum(length**2 for length in lengths)
    assert sum(one.seconds for one in passes) == pytest.approx(sum(step.train_s for step in steps))
    assert [group.index for group in groups] == list(range(6)) and groups[-1].lengths == [9, 7]
    assert sum(step.tokens for step in steps) == sum(sum(group.lengths) for group in groups)


def test_the_optimizers_update_has_seconds_of_its_own(
    policy_folder: Path, tmp_path: Path, data: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    # AdamW's own, though it inherits it of Adam: a first `torch.compile` in the process puts a
    # wrapper there, which a replacement at Adam would not reach.
    part_of_the_update = torch.optim.AdamW._init_group

    def slow(*args: Any) -> Any:
        time.sleep(0.1)
        return part_of_the_update(*args)

    monkeypatch.setattr(torch.optim.AdamW, "_init_group", slow)
    steps = of(StepRecord, fit(policy_folder, tmp_path, data, steps=2))
    assert all(0.1 <= step.update_s < step.seconds for step in steps), steps


def test_a_new_run_in_a_folder_removes_the_timeline_of_the_older_one(
    policy_folder: Path, tmp_path: Path, data: Steps
) -> None:
    fit(policy_folder, tmp_path, data, steps=3)
    records = fit(policy_folder, tmp_path, data, steps=2)
    assert [step.step for step in of(StepRecord, records)] == [0, 1]
    assert len(of(GroupRecord, records)) == 4


def test_without_throughput_the_error_names_it(
    policy_folder: Path, tmp_path: Path, data: Steps
) -> None:
    running = trainer(tmp_path, Timeline(), enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"without lrl.callbacks.Throughput"):
        running.fit(PolicyModule(str(policy_folder)), datamodule=data)
