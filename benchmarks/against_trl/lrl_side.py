"""lrl's side: one run in the project's environment. `__main__` starts it; its argument is a `Job`
as JSON.

Threads: with OMP_NUM_THREADS unset trainer and generator have half of the cores each, as in any
script that leaves OMP_WAIT_POLICY as it is.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import psutil

import lrl
from benchmarks.against_trl import settings
from benchmarks.against_trl.settings import Clock, Job
from lrl.callbacks import WeightSync


class Measure(L.Callback):
    """Keeps the time of every step, and policies. Put it after `WeightSync`: a step ends with its
    sync."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.clock = Clock(job)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.clock.start(psutil.Process().create_time())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        step_stream = trainer.datamodule.run.step_stream  # type: ignore[attr-defined]
        self.clock.step_done(
            trainer.global_step, sum(len(group.rollouts) for group in step_stream.groups)
        )
        if self.job.is_checkpoint(trainer.global_step):
            pl_module.export(self.job.checkpoint(trainer.global_step))


def train(job: Job) -> None:
    L.seed_everything(job.seed)
    policy = lrl.PolicyModule(
        job.policy,
        objective=lrl.objectives.AIPO(rho=4.0),
        lr=settings.LR,
        betas=settings.BETAS,
        weight_decay=settings.WEIGHT_DECAY,
        warmup_steps=settings.WARMUP_STEPS,
        schedule=settings.SCHEDULE,
        max_grad_norm=settings.MAX_GRAD_NORM,
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
        temperature=settings.TEMPERATURE,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lrl.AsyncSingleDevice(generator_devices=1),
        max_steps=job.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=job.folder,
        callbacks=[WeightSync(), Measure(job)],
    )
    trainer.fit(policy, data)


if __name__ == "__main__":
    train(Job.read(sys.argv[1]))
