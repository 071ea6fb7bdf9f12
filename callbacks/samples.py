"""Sample responses of a step, with the reference answer, as text or as a table of the logger."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lrl.system.writable_text import writable
from lrl.types import Group, Prompt

MAX_TEXT = 2000
"""Characters of a prompt, an answer or a response that are shown."""
SAMPLES = "rollouts/samples"


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
    """Returns a sample as text."""
    facts = [f"reward {shown['reward']}", f"{shown['tokens']} tokens", shown["finish reason"]]
    facts += [f"versions {shown['versions']}", f"step {shown['step']}"]
    head = f"**Row {shown['prompt id']}** · {', '.join(facts)}"
    names = [name for name in ("prompt", "answer", "response") if shown[name] or name != "answer"]
    parts = [f"**{name.capitalize()}**\n\n{_quoted(shown[name])}" for name in names]
    return "\n\n".join([head, *parts])


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
