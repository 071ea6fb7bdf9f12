"""The learning rate over a run's steps, and how a resumed run comes to the one its config asks for."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["constant", "linear", "cosine"]


def check_end(schedule: Schedule, max_steps: int) -> None:
    """Raises ValueError for a schedule that falls to 0 at the end of a run without one."""
    if schedule != "constant" and max_steps < 1:
        raise ValueError(f"model.schedule={schedule!r} needs an end: set trainer.max_steps (now {max_steps})")


def lr_factor(schedule: Schedule, warmup_steps: int, max_steps: int, step: int) -> float:
    """Learning rate of `step` (from 0) over its peak: up to 1 during warm-up, then down to 0 at `max_steps`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2


def restart_at(optimizer: torch.optim.Optimizer, scheduler: LambdaLR, lr: float, settings: dict[str, Any]) -> None:
    """Let the peak learning rate `lr` and AdamW's `settings` win over those in the state of a checkpoint."""
    scheduler.base_lrs = [lr] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group.update(lr=lr * factor(scheduler.last_epoch), initial_lr=lr, **settings)
