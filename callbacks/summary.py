"""The last page of a run: one table, the learning curve as a picture, where everything lies, and how to talk to it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import lightning as L
from rich.console import Console
from rich.table import Table

from lrl.callbacks.base import OnRankZero, find, find_all
from lrl.callbacks.evaluation import Evaluation
from lrl.callbacks.export import Export
from lrl.callbacks.rollout_log import RolloutLog
from lrl.callbacks.throughput import StepTimes, Throughput
from lrl.callbacks.weight_sync import WeightSync
from lrl.runtime.best_effort import best_effort
from lrl.runtime.run_folder import run_folder
from lrl.runtime.stopwatch import GENERATOR, shares


class Summary(OnRankZero):
    """Prints the summary when training ends and draws `curve.png`."""

    def __init__(self) -> None:
        self.rewards: list[tuple[int, float]] = []
        self.rollouts = 0
        self.tokens = 0
        self.lag_sum = 0
        self.lag_max = 0
        self.times = StepTimes()
        """Of all steps together."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Add up the step."""
        stream: Any = trainer.datamodule.step_stream  # type: ignore[attr-defined]
        rollouts = [rollout for group in stream.groups for rollout in group.rollouts]
        lags = [stream.step - version for rollout in rollouts for version in rollout.versions]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        if rewards:
            self.rewards.append((stream.step + 1, sum(rewards) / len(rewards)))
        self.rollouts += len(rollouts)
        self.tokens += len(lags)
        self.lag_sum += sum(lags)
        self.lag_max = max([self.lag_max, *lags])
        throughput = find(trainer, Throughput)
        if throughput is not None:
            self.times.add(throughput.times)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw and print."""
        folder = run_folder(trainer)
        evaluations = find_all(trainer, Evaluation)
        picture = folder / "curve.png"
        with best_effort("The learning curve", picture):
            draw_curve(picture, self.rewards, evaluations)
        console = Console()
        console.print(self._table(trainer, evaluations))
        console.print(f"TensorBoard    tensorboard --logdir {folder}", soft_wrap=True)
        if find(trainer, RolloutLog) is not None:
            console.print("  overview     tab Custom Scalars: http://localhost:6006/#custom_scalars", soft_wrap=True)
        console.print(f"curve          {picture}", soft_wrap=True)
        export = find(trainer, Export)
        if export is not None:
            console.print(f"policy         {export.path(trainer)}", soft_wrap=True)
            prompt = shlex.quote(trainer.datamodule.prompts[0].text)  # type: ignore[attr-defined]
            console.print(f"talk to it     {_command()} talk {export.path(trainer)} {prompt}", soft_wrap=True)

    def _table(self, trainer: L.Trainer, evaluations: list[Evaluation]) -> Table:
        table = Table(title="Summary", show_header=False)
        for evaluation in evaluations:
            before, after = evaluation.reports[0][1], evaluation.reports[-1][1]
            table.add_row(
                f"accuracy on {evaluation.prompts.name}",
                f"{before.accuracy:.3f} before, {after.accuracy:.3f} after ({after.low:.3f} to {after.high:.3f})",
            )
        table.add_row("steps", f"{trainer.global_step}")
        table.add_row("rollouts", f"{self.rollouts:,} with {self.tokens:,} tokens")
        table.add_row("lag", f"mean {self.lag_sum / max(1, self.tokens):.2f}, max {self.lag_max}")
        if find(trainer, WeightSync) is not None:
            table.add_row("sync", f"{self.times.sync:.1f} s, generators paused {self.times.sync_pause:.1f} s")
        if self.times.step:
            for row in _time_rows(self.times):
                table.add_row(*row)
        return table


def _time_rows(times: StepTimes) -> list[tuple[str, str]]:
    """What each side did with its time; of the trainer's waits, what for."""
    waits = {"first group": "wait_first", "next": "wait_next", "last": "wait_last", "rewards": "wait_reward"}
    parts = ", ".join(f"{name} {times.trainer.get(state, 0.0) / times.step:.0%}" for name, state in waits.items())
    generators = shares(times.generators, GENERATOR)
    return [
        (
            "time of the trainer",
            f"{times.step:.0f} s: waiting for rollouts {times.wait / times.step:.0%} ({parts}), "
            f"training {times.train / times.step:.0%}, syncing {times.sync / times.step:.0%}",
        ),
        ("time of the generators", ", ".join(f"{state} {share:.0%}" for state, share in generators.items())),
    ]


def draw_curve(path: Path, rewards: list[tuple[int, float]], evaluations: list[Evaluation]) -> None:
    """Reward of the rollouts and accuracy of the evaluations over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if rewards:
        axes.plot(*zip(*rewards, strict=True), color="tab:gray", linewidth=1, label="reward of the rollouts (mean)")
    for evaluation in evaluations:
        steps = [step for step, _ in evaluation.reports]
        reports = [report for _, report in evaluation.reports]
        accuracy = [report.accuracy for report in reports]
        spread = [[r.accuracy - r.low for r in reports], [r.high - r.accuracy for r in reports]]
        label = f"accuracy on {evaluation.prompts.name} (95 % interval)"
        axes.errorbar(steps, accuracy, yerr=spread, marker="o", capsize=3, label=label)
    axes.set_xlabel("optimizer steps")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _command() -> str:
    """`lrl` as this run was started: a newcomer's shell may not have the environment's folder on its path."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "lrl" else "lrl"
