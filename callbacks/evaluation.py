"""Evaluates held-out prompts during the training, on the same generators.

During fit an evaluation sends a few low-priority requests at a time, in slots that rollouts do not
use. It takes longer than a sync interval, so its responses may span versions, which are logged; with
a reserved generator (`strategy.evaluation_generators`) all come from one. Before the first step and
after the last one the trainer waits for the metrics.
"""

from __future__ import annotations

import concurrent.futures
import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console

from lrl.callbacks.base import OnRankZero, run_of
from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError, above, at_least
from lrl.evaluation import Report, evaluate, write_responses
from lrl.rewards import Reward, RewardPool
from lrl.rewards.base import OneReward, as_list
from lrl.rollouts.prompts import Prompts
from lrl.system.output import best_effort, progress_bar
from lrl.types import LEAST_TEMPERATURE, Group, Sampling

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule

log = logging.getLogger(__name__)


class Evaluation(OnRankZero):
    """Mean reward on a data set, every so many steps and by `trainer.validate`; also the accuracy,
    if the reward tells right from wrong (`lrl.rewards.Reward.binary`).

    Args:
        prompts: The data set: `lrl.Prompts`, the name of a data set on the hub, or a file.
        every_n_steps: Optimizer steps between evaluations within fit.
        samples: Responses per problem; 1 with temperature 0 is greedy, more give avg@k and pass@k.
        temperature: Sampling temperature of the responses: 0 for greedy ones, or at least 0.01,
            vLLM's lowest.
        rewards: What scores the responses; by default the data module's first reward. A single one
            counts without its weight, which is for training; several count as their weighted sum.
        by: Columns to break the mean down by.
        concurrency: Responses asked for at a time while rollouts are being written.
        timeout_s: Seconds for one evaluation.
    """

    def __init__(
        self,
        prompts: Prompts | str,
        every_n_steps: int = 20,
        samples: int = 1,
        temperature: float = 0.0,
        rewards: Sequence[OneReward] | OneReward | None = None,
        by: Sequence[str] = (),
        concurrency: int = 32,
        timeout_s: float = 3600.0,
    ) -> None:
        at_least(1, "Evaluation", every_n_steps=every_n_steps, samples=samples)
        at_least(0, "Evaluation", temperature=temperature)
        above(0, "Evaluation", timeout_s=timeout_s)
        at_least(samples, "Evaluation", concurrency=concurrency)
        if 0 < temperature < LEAST_TEMPERATURE:
            raise ConfigError(
                f"Evaluation.temperature is {temperature}; vLLM samples at 0 or from "
                f"{LEAST_TEMPERATURE} on."
            )
        if samples > 1 and temperature == 0:
            raise ConfigError(
                f"Evaluation.samples is {samples} with temperature 0: all responses would be the "
                "same. Raise it."
            )
        self.prompts = Prompts.coerce(prompts, split="test")
        self.sampling = Sampling(n=samples, temperature=temperature)
        self.rewards = as_list(rewards)
        self.every_n_steps = every_n_steps
        self.by = by
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.reports: list[tuple[int, Report]] = []
        """(version of the generators at its start, result), in order."""
        self._pool: RewardPool | None = None
        self._running: tuple[int, concurrent.futures.Future[list[Group]]] | None = None

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Loads the problems and starts the reward worker before any server."""
        run = run_of(trainer)
        data = run.data
        n, temperature = self.sampling.n, self.sampling.temperature
        self.sampling = replace(data.requests, n=n, temperature=temperature)
        self._pool = data.reward_pool.like(self.rewards_for_evaluation(data), workers=1)
        run.start_rewards(self._pool, next(iter(self.prompts)))

    def rewards_for_evaluation(self, data: RolloutDataModule) -> list[Reward]:
        rewards = self.rewards or data.reward_pool.rewards[:1]
        if len(rewards) == 1:
            rewards = [copy.copy(rewards[0])]
            rewards[0].weight = 1.0
        return rewards

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.run(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Reports a finished evaluation, and begins one every `every_n_steps`."""
        if trainer.global_step == trainer.max_steps:
            return  # `on_train_end` evaluates the last step
        if self._running is not None and self._running[1].done():
            self._report(trainer)
        if trainer.global_step % self.every_n_steps:
            return
        if self._running is None:
            self._begin(trainer, slots=self.concurrency)
            return
        text = "The evaluation of %s begun at step %d still runs; that of step %d is left out."
        begun = self._running[0]
        log.warning(f"{text} Raise every_n_steps.", self.prompts.name, begun, trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._running is not None:
            self._report(trainer)
        self.run(trainer)

    def run(self, trainer: L.Trainer) -> dict[str, float]:
        with progress_bar(f"evaluating {self.prompts.name}", "problem", len(self.prompts)) as bar:
            self._begin(trainer, done=bar.update)
            self._wait(trainer)
        return self._report(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Prints the report and the path of the responses (`trainer.validate`)."""
        step, report = self.reports[-1]
        console = Console(highlight=False, markup=False, soft_wrap=True)
        console.print(report.as_table())
        console.print(f"  every response: {self._responses_file(trainer, step)}")

    def _begin(self, trainer: L.Trainer, **how: Any) -> None:
        """Sends the problems to the generators, as `Run.evaluate` does with `how`."""
        assert self._pool is not None, "set up"
        run = run_of(trainer)
        self._running = run.evaluate(self.prompts, self.sampling, self._pool, **how)

    def _wait(self, trainer: L.Trainer) -> tuple[int, list[Group]]:
        assert self._running is not None
        step, future = self._running
        run, what = run_of(trainer), f"evaluating {self.prompts.name}"
        return step, run.loop.wait(future, self.timeout_s, what, run.poll)

    def _report(self, trainer: L.Trainer) -> dict[str, float]:
        """Waits for the evaluation, writes responses and logs metrics."""
        step, groups = self._wait(trainer)
        self._running = None
        assert self._pool is not None, "set up"
        rewards = self._pool.rewards
        report = evaluate(
            self.prompts.name,
            groups,
            greedy=self.sampling.temperature == 0,
            binary=len(rewards) == 1 and rewards[0].binary,
            by=self.by,
        )
        metrics = report.metrics()
        self.reports.append((step, report))
        path = self._responses_file(trainer, step)
        with best_effort(f"The responses to {self.prompts.name}", path):
            write_responses(path, self.prompts.name, groups)
        if trainer.training:
            rank_zero_info(f"step {step}: {report.as_line()}")
            # `log` is not allowed in every hook that calls this, and would use the trainer's step.
            values = {name: torch.tensor(value) for name, value in metrics.items()}
            trainer.callback_metrics.update(values)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)
        return metrics

    def _responses_file(self, trainer: L.Trainer, step: int) -> Path:
        return run_folder(trainer) / "evaluation" / f"{self.prompts.name}-step{step:06d}.jsonl"
