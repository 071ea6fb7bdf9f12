"""The learning rate over a run, without torch: TRL's side of the benchmark uses it, too."""

import math
from typing import Literal

from lrl.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]


def check_end(schedule: Schedule, max_steps: int) -> None:
    """Raises ValueError for a schedule that falls to 0 at the end of a run without an end."""
    if schedule != "constant" and max_steps < 1:
        raise ConfigError(
            f"model.schedule={schedule!r} needs an end: set trainer.max_steps (now {max_steps})"
        )


def lr_factor(
    schedule: Schedule, warmup_steps: int, max_steps: int, step: int, first_step: int = 0
) -> float:
    """Returns learning rate over peak at `step` (from 0): 0 before `first_step`, up to 1 in
    warm-up, then down to 0 at `max_steps`."""
    if step < first_step:
        return 0.0
    step -= first_step
    max_steps -= first_step
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
