"""Whole runs of a real policy, trainer and strategy whose groups are given: what happens around a
step, in a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.strategies import SingleDeviceStrategy

from lrl.policy import PolicyModule
from lrl.strategies.generator_devices import GracefulShutdown
from lrl.training.collate import blank
from lrl.types import MicroBatch
from tests import policies
from tests.policies import FakeStep, make_group, pack

STEPS_PER_EPOCH = 3
MICRO_BATCHES = 3


class WithoutGenerators(GracefulShutdown, SingleDeviceStrategy):
    """The ends of a run, and nothing to start."""


class StepOfRank(FakeStep):
    """A rank's share of a step that depends on the policy's version alone."""

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(micro_batches(trainer.global_step))
        ranks = trainer.world_size
        blanks = [blank()] * (-len(self.batches) % ranks)
        self.own = [*self.batches, *blanks][trainer.global_rank :: ranks]

    def __iter__(self) -> Iterator[MicroBatch]:
        yield from self.own


class StepsByVersion(L.LightningDataModule):
    """Such steps, as `RolloutDataModule` makes them."""

    def train_dataloader(self) -> StepsByVersion:
        return self

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __iter__(self) -> Iterator[FakeStep]:
        assert self.trainer is not None
        while True:
            yield StepOfRank(self.trainer)


def micro_batches(step: int) -> list[MicroBatch]:
    """Three micro-batches, those of each step different."""
    numbers = range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1))
    return [micro for number in numbers for micro in pack([make_group(number, responses=2)])]


def trainer(folder: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "strategy": WithoutGenerators(device="cpu"),
        "max_steps": 7,
        "max_epochs": -1,
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
    }
    how = defaults | settings
    return policies.trainer(callbacks=list(callbacks), default_root_dir=folder, **how)


def fit(policy: str, running: L.Trainer, ckpt_path: Path | str | None = None) -> PolicyModule:
    module = PolicyModule(policy, lr=1e-2, warmup_steps=2)
    running.fit(module, datamodule=StepsByVersion(), ckpt_path=ckpt_path)
    return module
