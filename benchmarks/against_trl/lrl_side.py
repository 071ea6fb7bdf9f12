"""lrl's side: one run in the project's environment. `__main__` starts it; its argument is a `Job`
as JSON.

Threads: with OMP_NUM_THREADS unset trainer and generator have half of the cores each, as in any
script that leaves OMP_WAIT_POLICY as it is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L
import psutil

import lrl
from benchmarks.against_trl import settings
from benchmarks.against_trl.settings import Clock, Job
from benchmarks.runs import EveryStep, quiet_trainer
from lrl.callbacks import WeightSync


class Measure(EveryStep):
    """Keeps the time of every step, and policies."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.clock = Clock(job)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock.start(psutil.Process().create_time())

    def step_done(self, trainer: Any) -> None:
        step, groups = trainer.global_step, trainer.datamodule.run.step_stream.groups
        self.clock.step_done(step, sum(len(group.rollouts) for group in groups))
        if self.job.is_checkpoint(step):
            trainer.lightning_module.export(self.job.checkpoint(step))


def train(job: Job) -> None:
    L.seed_everything(job.seed)
    policy = lrl.PolicyModule(  # the other settings are the usual ones, and TRL gets them
        job.policy,
        objective=lrl.objectives.AIPO(rho=4.0),
        lr=settings.LR,
        warmup_steps=settings.WARMUP_STEPS,
        schedule=settings.SCHEDULE,
        dtype="float32",
    )
    data = lrl.RolloutDataModule(
        prompts=lrl.Prompts(job.prompts, shuffle=False),
        rewards=["lrl.quickstart.task:correct"],
        groups_per_step=settings.GROUPS,
        rollouts_per_group=settings.ROLLOUTS,
        max_lag=job.max_lag,
        max_prompt_tokens=settings.PROMPT_TOKENS,
        max_response_tokens=settings.ANSWER_TOKENS,
    )
    trainer = quiet_trainer(
        job.steps,
        Path(job.folder),
        devices=2,
        strategy=lrl.AsyncSingleDevice(generator_devices=1),
        callbacks=[WeightSync(), Measure(job)],
    )
    trainer.fit(policy, data)


if __name__ == "__main__":
    train(Job(**json.loads(sys.argv[1])))
