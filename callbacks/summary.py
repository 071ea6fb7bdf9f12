"""Last page of a run: a table, the learning curve, the paths of its files, and the chat command."""

import shlex
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from rich.console import Console
from rich.table import Table

from lrl.callbacks.base import OnRankZero, find, find_all, run_of
from lrl.callbacks.evaluation import Evaluation
from lrl.callbacks.export import Export
from lrl.callbacks.health import Health
from lrl.callbacks.rollout_file import RolloutFile
from lrl.callbacks.throughput import StepTimes, times_of
from lrl.checkpoints.run_folder import run_folder
from lrl.rewards.pool import EPISODE_KINDS, KINDS
from lrl.rollouts.prompts import Prompts
from lrl.system.output import best_effort
from lrl.system.stopwatch import GENERATOR, TRAINER, shares


class Summary(OnRankZero):
    """Prints the summary when training ends and draws `curve.png`."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.rewards: list[tuple[int, float]] = []
        """(number of steps done, mean reward)."""
        self.steps = self.rollouts = self.tokens = self.lag_sum = self.lag_max = 0
        self.times = StepTimes()
        """Sum over all steps."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        stream = run_of(trainer).step_stream
        rollouts = [rollout for group in stream.groups for rollout in group.rollouts]
        lags = [stream.step - version for one in rollouts for version in one.policy_versions]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        if rewards:
            self.rewards.append((stream.step + 1, sum(rewards) / len(rewards)))
        self.steps += 1
        self.rollouts += len(rollouts)
        self.tokens += len(lags)
        self.lag_sum += sum(lags)
        self.lag_max = max([self.lag_max, *lags])
        self.times.add(times_of(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        evaluations = find_all(trainer, Evaluation)
        picture = run_folder(trainer) / "curve.png"
        with best_effort("The learning curve", picture):
            draw_curve(picture, self.rewards, evaluations)
        lines = [where_metrics_are(logger) for logger in trainer.loggers]
        if find(trainer, RolloutFile) is not None:
            lines.append(f"rollouts       {shlex.join([program(), 'view', str(picture.parent)])}")
        lines.append(f"curve          {picture}")
        if (export := find(trainer, Export)) is not None:
            lines.append(f"policy         {export.path(trainer)}")
            data = run_of(trainer).data
            name = "chat with it" if data.environment is None else "its first turn"
            lines.append(f"{name:14} {chat_command(export.path(trainer), data.prompts)}")
        console = Console()
        console.print(self._table(trainer, evaluations))
        for line in lines:
            console.print(line, soft_wrap=True)

    def _table(self, trainer: L.Trainer, evaluations: list[Evaluation]) -> Table:
        table = Table(title="Summary", show_header=False)
        for evaluation in evaluations:
            before, after = evaluation.reports[0][1], evaluation.reports[-1][1]
            values = f"{before.reward:.3f} before, {after.reward:.3f} after"
            interval = f"({after.low:.3f} to {after.high:.3f})"
            name = f"{after.measure} on {evaluation.prompts.name}"
            table.add_row(name, f"{values} {interval}")
        if self.rewards:
            first, last = self.rewards[0][1], self.rewards[-1][1]
            table.add_row("reward", f"{first:.3f} in the first step, {last:.3f} in the last")
        own = self.steps != trainer.global_step
        only = f", {self.steps} of them in this run" if own else ""
        table.add_row("steps", f"{trainer.global_step}{only}")
        table.add_row("rollouts", f"{self.rollouts:,} with {self.tokens:,} tokens")
        data, times = run_of(trainer).data, self.times
        failures = data.reward_pool.counts
        kinds = [kind for kind in (*KINDS, *EPISODE_KINDS) if failures[kind]]
        if kinds:
            listed = ", ".join(f"{kind} {failures[kind]:,}" for kind in kinds)
            table.add_row("without a reward", listed)
        table.add_row("lag", f"mean {self.lag_sum / max(1, self.tokens):.2f}, max {self.lag_max}")
        if (health := find(trainer, Health)) is not None and health.outside:
            steps = (f"{metric} ({count} steps)" for metric, count in health.outside.items())
            table.add_row("outside their range", ", ".join(steps))
        if times.step:
            table.add_row("time", f"{times.step:.0f} s, generators paused {times.sync_pause:.1f} s")
            table.add_row("of the trainer", _spent(times.trainer, TRAINER))
            table.add_row("of the generators", _spent(times.generators, GENERATOR))
        return table


def _spent(seconds: dict[str, float], states: tuple[str, ...]) -> str:
    """Returns the states that took a per cent of the time or more."""
    found = shares(seconds, states).items()
    return ", ".join(f"{state} {share:.0%}" for state, share in found if share >= 0.01)


def where_metrics_are(logger: Logger) -> str:
    if isinstance(logger, TensorBoardLogger):
        return f"TensorBoard    tensorboard --logdir {shlex.quote(logger.log_dir)}"
    place = getattr(logger, "log_dir", None) or f"{logger.name}, run {logger.version}"
    return f"metrics        {type(logger).__name__}, {place}"


def draw_curve(path: Path, rewards: list[tuple[int, float]], evaluations: list[Evaluation]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if rewards:
        label = "reward of the rollouts (mean)"
        axes.plot(*zip(*rewards, strict=True), color="tab:gray", linewidth=1, label=label)
    for evaluation in evaluations:
        steps, reports = zip(*evaluation.reports, strict=True)
        means = [r.reward for r in reports]
        spread = [[r.reward - r.low for r in reports], [r.high - r.reward for r in reports]]
        label = f"{reports[-1].measure} on {evaluation.prompts.name} (95 % interval)"
        axes.errorbar(steps, means, yerr=spread, marker="o", capsize=3, label=label)
    axes.set_xlabel("optimizer steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def chat_command(folder: Path, prompts: Prompts) -> str:
    """Returns the command, quoted for a shell, that asks the policy the run's first prompt."""
    typed = prompts.typed(prompts[0])
    question = ["--plain", prompts[0].text] if typed is None else [typed]
    return shlex.join([program(), "chat", str(folder), *question])


def program() -> str:
    """Returns `lrl` as this run was started: the next shell may not have it on its path."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "lrl" else "lrl"
