"""What the rollouts of each step look like: rewards, lengths, lags in numbers and histograms, and answers to read."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lrl.callbacks.base import OnRankZero, find_all
from lrl.callbacks.counts import NonzeroCounts
from lrl.callbacks.evaluation import Evaluation
from lrl.callbacks.overview import overview
from lrl.objectives.diagnostics import MAX_LAG_SHOWN
from lrl.rewards.failure_stats import KINDS
from lrl.rollouts.serialisation import Resumed
from lrl.runtime.best_effort import may_not_log
from lrl.runtime.config_errors import at_least
from lrl.types import Group, Rollout

MAX_TEXT = 2000
"""Characters of a prompt or a response that are shown."""


class RolloutLog(OnRankZero):
    """Logs `reward/*`, `rollouts/*`, `rewards/*` and `length_predictor/*` every step, histograms and sample responses
    every few.

    TensorBoard gets an overview of the run, too (`lrl.callbacks.overview`).

    Args:
        every_n_steps: Optimizer steps between histograms and samples.
        samples: Responses shown each time.
    """

    def __init__(self, every_n_steps: int = 10, samples: int = 4) -> None:
        at_least(1, "RolloutLog", every_n_steps=every_n_steps)
        at_least(0, "RolloutLog", samples=samples)
        self.every_n_steps = every_n_steps
        self.samples = samples
        self._counts = NonzeroCounts()
        self._overview: Literal["early", "due", "written"] = "early"

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Write the overview when the first step is over: only then is known which figures the others log."""
        self._write_overview(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The overview of a run of a single step."""
        self._write_overview(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Log the groups of the step that has just ended."""
        if self._overview == "early":
            self._overview = "due"
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        stream = data.step_stream
        rollouts = [rollout for group in stream.groups for rollout in group.rollouts]
        if not rollouts:
            return
        figures = scalars(rollouts)
        if "reward/mean" in figures:
            pl_module.log("reward/mean", figures.pop("reward/mean"), prog_bar=True, batch_size=1)
        pl_module.log_dict(
            figures
            | scalars_by_lag(rollouts, stream.step)
            | {"rollouts/padding": stream.packer.padding}
            | self._counts.to_log(
                {
                    "rollouts/discarded": stream.packer.discarded_rollouts,
                    "rollouts/masked_tokens": stream.packer.masked_tokens,
                    "rollouts/skipped_groups": len(data.controller.ledger.skipped),
                    "rollouts/replayed_groups": len(stream.replayed),
                    **{
                        f"rewards/{kind}": data.reward_pool.counts[kind]
                        for kind in ("gave_up", *KINDS, "retried", "replaced")
                    },
                }
            )
            | resumed_scalars(data.controller.resumed, stream.step)
            | (data.length_predictor.metrics() if data.length_predictor else {}),
            batch_size=1,
        )
        if stream.step % self.every_n_steps == 0:
            for logger in _boards(trainer):
                with may_not_log(logger):
                    self._show(logger.experiment, stream.step, stream.groups, rollouts)

    def _write_overview(self, trainer: L.Trainer) -> None:
        if self._overview != "due":
            return
        self._overview = "written"
        datasets = [evaluation.prompts.name for evaluation in find_all(trainer, Evaluation)]
        for logger in _boards(trainer):
            with may_not_log(logger):
                logger.experiment.add_custom_scalars(overview(trainer.callback_metrics, datasets))

    def _show(self, board: Any, step: int, groups: list[Group], rollouts: list[Rollout]) -> None:
        for name, values in histograms(rollouts, step).items():
            if values.numel():
                board.add_histogram(name, values, step)
        text = "\n\n---\n\n".join(as_markdown(group, step) for group in groups[: self.samples])
        board.add_text("rollouts/samples", text, step)


def _boards(trainer: L.Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def resumed_scalars(resumed: Resumed | None, step: int) -> dict[str, float]:
    """What the run found in its checkpoint, at its first step alone."""
    if resumed is None or resumed.step != step:
        return {}
    return {"rollouts/resumed_responses": float(resumed.responses), "rollouts/resumed_tokens": float(resumed.tokens)}


def scalars(rollouts: list[Rollout]) -> dict[str, float]:
    """Means over a step's responses; rewards over those that have one."""
    lengths = torch.tensor([float(len(rollout.token_ids)) for rollout in rollouts])
    found = {
        "rollouts/length_mean": lengths.mean().item(),
        "rollouts/truncated": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
    }
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    if not scored:
        return found
    rewards = torch.tensor([rollout.reward for rollout in scored])
    found |= {"reward/mean": rewards.mean().item(), "reward/std": rewards.std(correction=0).item()}
    for name in scored[0].reward_parts:
        parts = [rollout.reward_parts[name] for rollout in scored if name in rollout.reward_parts]
        found[f"reward/{name}"] = sum(parts) / len(parts)
    return found


def scalars_by_lag(rollouts: list[Rollout], step: int) -> dict[str, float]:
    """Share, mean length and mean reward of a step's responses, for every lag apart.

    The lag of a response is that of its oldest token, the trainer's step minus the smallest version in it; from
    `MAX_LAG_SHOWN` on they are pooled. A lag without a response has no figures, one without a scored response no
    reward.
    """
    by_lag: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.versions:
            by_lag[min(step - min(rollout.versions), MAX_LAG_SHOWN)].append(rollout)
    found = {}
    for lag, those in by_lag.items():
        found[f"rollouts/by_lag/{lag}/share"] = len(those) / len(rollouts)
        found[f"rollouts/by_lag/{lag}/length"] = sum(len(rollout.token_ids) for rollout in those) / len(those)
        rewards = [rollout.reward for rollout in those if rollout.reward is not None]
        if rewards:
            found[f"rollouts/by_lag/{lag}/reward"] = sum(rewards) / len(rewards)
    return found


def histograms(rollouts: list[Rollout], step: int) -> dict[str, Tensor]:
    """Length and reward per response, lag per token."""
    return {
        "rollouts/length": torch.tensor([float(len(rollout.token_ids)) for rollout in rollouts]),
        "reward/all": torch.tensor([rollout.reward for rollout in rollouts if rollout.reward is not None]),
        "rollouts/lag": torch.tensor([float(step - v) for rollout in rollouts for v in rollout.versions]),
    }


def as_markdown(group: Group, step: int) -> str:
    """The first response of a group with its prompt, reward and versions."""
    rollout = group.rollouts[0]
    versions = sorted(set(rollout.versions))
    reward = f"reward {rollout.reward:.3g}" if rollout.reward is not None else f"no reward ({rollout.reward_failure})"
    facts = (
        f"{reward}, {len(rollout.token_ids)} tokens, {rollout.finish_reason}, versions {versions}, trained at {step}"
    )
    question, response = _quoted(group.prompt.text), _quoted(rollout.text)
    return f"**Prompt {group.prompt.id}** · {facts}\n\n{question}\n\n**Answer**\n\n{response}"


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text[:MAX_TEXT].splitlines() or [""])
