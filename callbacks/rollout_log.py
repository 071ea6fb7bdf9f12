"""Rewards, lengths and lags of each step's rollouts, and sample responses."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lrl.callbacks.base import NonzeroCounts, OnRankZero, run_of
from lrl.errors import at_least
from lrl.rewards.pool import EPISODE_KINDS, KINDS
from lrl.system.output import may_not_log, writable
from lrl.types import Group, Prompt, Rollout

REWARD_COUNTS = ("gave_up", *KINDS, "retried", "replaced", "moved")
MAX_TEXT = 2000
"""Characters of a prompt, an answer or a response that are shown."""
SAMPLES = "rollouts/samples"
CHARTS = {
    "reward": ["^reward/mean$"],
    "reward of evaluations": ["^eval/[^/]+/reward$"],
    "effective sample size (0 to 1)": ["^policy/ess$"],
    "where the trainer's time goes (s)": ["^time/(step|wait|train|sync)$"],
    "response length (tokens)": ["^rollouts/length_mean$"],
    "lag (versions)": ["^policy/lag_(mean|max)$"],
}
"""Charts of TensorBoard's "Custom Scalars", and patterns of their tags."""


class RolloutLog(OnRankZero):
    """Logs `reward/*`, `rollouts/*`, `rewards/*` and `episodes/*` every step, and sample responses
    every few. TensorBoard also gets an overview of the run.

    Args:
        every_n_steps: Optimizer steps between samples.
        samples: Responses shown each time.
    """

    def __init__(self, every_n_steps: int = 10, samples: int = 4) -> None:
        at_least(1, "RolloutLog", every_n_steps=every_n_steps)
        at_least(0, "RolloutLog", samples=samples)
        self.every_n_steps = every_n_steps
        self.samples = samples
        self._counts = NonzeroCounts()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        layout = {"Overview": {title: ["Multiline", tags] for title, tags in CHARTS.items()}}
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                with may_not_log(logger):
                    logger.experiment.add_custom_scalars(layout)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        run = run_of(trainer)
        data, stream, ledger = run.data, run.step_stream, run.calls.controller.ledger
        rollouts = [rollout for group in stream.groups for rollout in group.rollouts]
        if not rollouts:
            return
        metrics = scalars(rollouts)
        if "reward/mean" in metrics:
            pl_module.log("reward/mean", metrics.pop("reward/mean"), prog_bar=True, batch_size=1)
        counts = {
            "rollouts/discarded": stream.packer.discarded_rollouts,
            "rollouts/masked_tokens": stream.packer.masked_tokens,
            "rollouts/skipped_groups": len(ledger.skipped),
            "rollouts/replayed_groups": len(stream.replayed),
            **{f"rewards/{kind}": data.reward_pool.counts[kind] for kind in REWARD_COUNTS},
            "rewards/scorers": len(data.reward_pool.workers.members.ready),
            **episode_counts(data),
        }
        pl_module.log_dict(
            metrics
            | {"rollouts/padding": stream.packer.padding, "rollouts/shared": stream.packer.shared}
            | self._counts.to_log(counts),
            batch_size=1,
        )
        if stream.step % self.every_n_steps == 0:
            samples = [sample(group, stream.step) for group in stream.groups[: self.samples]]
            for logger in trainer.loggers if samples else ():
                with may_not_log(logger):
                    log_samples(logger, samples, stream.step)


def episode_counts(data: Any) -> dict[str, int]:
    """Returns the counts of failures of episodes and environments; empty without one."""
    if data.environment is None:
        return {}
    failed = {f"episodes/{kind}": data.reward_pool.counts[kind] for kind in EPISODE_KINDS}
    counts, workers = data.environment.pool.counts, data.environment.workers
    return failed | {
        "episodes/replayed": counts["replayed"],
        "episodes/restarted": counts["restarted"],
        "episodes/replaced": workers.replaced if workers else 0,
        "episodes/environments": len(workers.members.ready) if workers else 0,
    }


def scalars(rollouts: list[Rollout]) -> dict[str, float]:
    """Returns means over a step's responses; rewards over the responses that have one."""
    lengths = torch.tensor([float(rollout.num_tokens) for rollout in rollouts])
    found = {
        "rollouts/length_mean": lengths.mean().item(),
        "rollouts/truncated": sum(rollout.cut for rollout in rollouts) / len(rollouts),
    }
    if any(rollout.turn_ends for rollout in rollouts):
        found["episodes/turns"] = sum(len(one.turn_ends) for one in rollouts) / len(rollouts)
        if any(rollout.forks for rollout in rollouts):
            found["episodes/branches"] = sum(len(one.branches) for one in rollouts) / len(rollouts)
        cut = Counter(one.finish_reason for one in rollouts)
        found["episodes/token_limit"] = cut["length"] / len(rollouts)
        found["episodes/turn_limit"] = cut["turns"] / len(rollouts)
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    if not scored:
        return found
    rewards = torch.tensor([rollout.reward for rollout in scored])
    found |= {"reward/mean": rewards.mean().item(), "reward/std": rewards.std(correction=0).item()}
    for name in scored[0].reward_parts:
        parts = [rollout.reward_parts[name] for rollout in scored if name in rollout.reward_parts]
        found[f"reward/{name}"] = sum(parts) / len(parts)
    return found


def sample(group: Group, step: int) -> dict[str, Any]:
    """Returns the first response of a group, with prompt and reference answer, as a row."""
    rollout = group.rollouts[0]
    reward = rollout.reward_failure if rollout.reward is None else f"{rollout.reward:.3g}"
    return {
        "step": step,
        "prompt id": group.prompt.id,
        "prompt": writable(group.prompt.text[:MAX_TEXT]),
        "answer": writable(reference(group.prompt)[:MAX_TEXT]),
        "response": writable(rollout.text[:MAX_TEXT]),
        "reward": writable(str(reward)),
        "tokens": rollout.num_tokens,
        "finish reason": rollout.finish_reason,
        "versions": ", ".join(map(str, sorted(set(rollout.policy_versions)))),
    }


def reference(prompt: Prompt) -> str:
    """Returns the reference answer of a prompt: its column `answer`, or else all its columns."""
    if "answer" in prompt.columns:
        return str(prompt.columns["answer"])
    return ", ".join(f"{name}: {value}" for name, value in prompt.columns.items())


def log_samples(logger: Logger, samples: Sequence[Mapping[str, Any]], step: int) -> None:
    """Logs samples as text where the logger has that, or as a table."""
    columns = list(samples[0])
    if isinstance(logger, TensorBoardLogger):
        text = "\n\n---\n\n".join(map(as_markdown, samples))
        logger.experiment.add_text(SAMPLES, text, step)
    elif isinstance(logger, WandbLogger):
        logger.log_table(SAMPLES, columns, [list(one.values()) for one in samples], step=step)
    elif isinstance(logger, MLFlowLogger):
        rows = {column: [one[column] for one in samples] for column in columns}
        # A file for each step: to one file MLflow would add by fetching and sending all rows again.
        logger.experiment.log_table(logger.run_id, rows, f"{SAMPLES}/step{step:06d}.json")


def as_markdown(shown: Mapping[str, Any]) -> str:
    lines = (line for name, value in shown.items() for line in f"{name}: {value}".splitlines())
    return "\n".join(f"    {line}" for line in lines)
