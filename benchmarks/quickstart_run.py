"""One short run of the quickstart's task on a lent server: the common part of the benchmarks of
learning.

The task, the policy and its warm-up are the quickstart's, which keeps the policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import lightning as L

import lrl
from benchmarks.arguments import Row
from benchmarks.runs import Borrowing, LentServer, quiet_trainer
from lrl.callbacks import Evaluation, Throughput, WeightSync
from lrl.objectives import Objective
from lrl.quickstart.task import correct
from lrl.quickstart.warmup import make_policy
from lrl.training.optimizers import Schedule

POLICIES = Path("runs/quickstart")
PROMPT_TOKENS, RESPONSE_TOKENS = 16, 32
CAPACITY = 256
"""Rollouts the server writes at once, as in the quickstart."""
PROBE_TOLERANCE = 1e-2
"""A policy that has collapsed gives some tokens so little probability that float32 itself is off by
more than 1e-3."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run, except its objective."""

    seed: int
    """Of warm-up, order of the problems, and torch."""
    max_lag: int
    lr: float
    """Peak; the schedule follows ten steps of rise."""
    schedule: Schedule
    steps: int
    groups: int
    responses: int

    @classmethod
    def of(cls, run: Row) -> RunSettings:
        return cls(**{one.name: run[one.name] for one in fields(cls)})


def policy_of(seed: int) -> Path:
    """Returns the folder of a seed's warmed-up policy; makes it in about a minute if it is not
    there."""
    return make_policy(POLICIES / f"policy-seed{seed}", seed)


def server_settings() -> lrl.ServerSettings:
    return lrl.ServerSettings(
        max_model_len=PROMPT_TOKENS + RESPONSE_TOKENS,
        max_num_seqs=CAPACITY,
        dtype="float32",
        kv_cache_gib=0.5,
    )


def make_trainer(
    server: LentServer, settings: RunSettings, callbacks: Sequence[L.Callback], folder: Path
) -> L.Trainer:
    return quiet_trainer(
        settings.steps,
        folder,
        devices=2,
        strategy=Borrowing(server, CAPACITY),
        callbacks=[WeightSync(probe_tolerance=PROBE_TOLERANCE), Throughput(), *callbacks],
    )


def make_module(settings: RunSettings, objective: Objective) -> lrl.PolicyModule:
    L.seed_everything(settings.seed, verbose=False)
    return lrl.PolicyModule(
        str(policy_of(settings.seed)),
        objective=objective,
        lr=settings.lr,
        warmup_steps=10,
        schedule=settings.schedule,
    )


def make_data(
    settings: RunSettings,
    source: str = "lrl.quickstart.task:problems",
    limit: int | None = None,
    **more: Any,
) -> lrl.RolloutDataModule:
    """Returns the quickstart's reward and training problems, or those of another `source`, with
    `more` arguments."""
    return lrl.RolloutDataModule(
        prompts=lrl.Prompts(source, seed=settings.seed, limit=limit),
        rewards=[correct],
        groups_per_step=settings.groups,
        rollouts_per_group=settings.responses,
        max_lag=settings.max_lag,
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=RESPONSE_TOKENS,
        micro_batch_tokens=8192,
        **more,
    )


class Standstill(Evaluation):
    """An evaluation for which the trainer waits, so that all responses are by one version.

    Beside the rollouts of a run with a large `max_lag`, which keep the generator busy all the time,
    an evaluation took more than ten steps.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != trainer.max_steps:
            self.run(trainer)


def held_out(every_n_steps: int) -> Standstill:
    problems = lrl.Prompts("lrl.quickstart.task:held_out", name="held_out", shuffle=False)
    return Standstill(problems, every_n_steps=every_n_steps)
