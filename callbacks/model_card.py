"""The model card of an exported policy: what it was trained from, how, and how good it is. It is the
folder's README, which the hub shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from lrl.callbacks.evaluation import Evaluation
from lrl.datamodule import RolloutDataModule

FILE = "README.md"


def write(
    folder: Path, *, policy: Any, data: Any, steps: int, evaluations: list[Evaluation]
) -> None:
    """Writes the card of a `lrl.PolicyModule`, trained on a `lrl.RolloutDataModule` in so many
    optimizer steps, into its folder."""
    base = None if Path(policy.policy_folder).exists() else str(policy.policy_folder)
    about = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["lrl", "reinforcement-learning", type(policy.objective).__name__.lower()],
    )
    parts = [
        f"---\n{about.to_yaml()}\n---",
        f"# {Path(policy.policy_folder).name}",
        f"Trained from {base or 'a local folder'} by asynchronous reinforcement learning with lrl, in "
        f"{steps} optimizer steps.",
    ]
    for measure in ("accuracy", "mean reward"):
        if rows := _rows(evaluations, measure):
            head = ("data set", "step", measure, "95 % interval", "problems", "decoding")
            parts += [f"## {measure.capitalize()}", _table(head, rows)]
    parts += ["## Training", _table(("setting", "value"), settings(policy, data))]
    (folder / FILE).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def settings(policy: Any, data: Any) -> list[tuple[str, object]]:
    """Returns what decides what a policy learns, by the names of the settings."""
    found: dict[str, object] = {
        "model.objective": _described(policy.objective),
        "model.lr": policy.lr,
        "model.schedule": policy.schedule,
        "model.warmup_steps": policy.warmup_steps,
        "model.lora": _described(policy.lora),
    }
    if isinstance(data, RolloutDataModule):
        environment = None if data.environment is None else data.environment.environment
        found |= {
            "data.prompts": data.prompts.name,
            "data.rewards": ", ".join(reward.name for reward in data.reward_pool.rewards),
            "data.environment": _described(environment),
            "data.groups_per_step": data.groups_per_step,
            "data.rollouts_per_group": data.requests.n,
            "data.max_response_tokens": data.requests.max_tokens,
            "data.temperature": data.requests.temperature,
            "data.max_lag": data.max_lag,
        }
    return [(name, value) for name, value in found.items() if value is not None]


def _described(part: object) -> str | None:
    """Returns the class of a part of the run, with its plain arguments."""
    if part is None:
        return None
    plain = [
        f"{name}={value}"
        for name, value in vars(part).items()
        if name[0] != "_" and isinstance(value, bool | int | float)
    ]
    return f"{type(part).__name__}({', '.join(plain)})"


def _rows(evaluations: Sequence[Evaluation], measure: str) -> list[tuple[object, ...]]:
    """Returns the rows of the evaluations of which the last one has that measure."""
    return [
        (
            report.dataset,
            step,
            f"{report.reward:.3f}",
            f"{report.low:.3f} to {report.high:.3f}",
            report.n,
            "greedy" if report.greedy else f"mean of {report.k} sampled",
        )
        for evaluation in evaluations
        if evaluation.reports and evaluation.reports[-1][1].measure == measure
        for step, report in evaluation.reports
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
