"""The settings of both sides. Both environments import it, so it needs only Python.

Learning rate, schedule, batch and lengths are those of `recipes/quickstart.yaml`; the rest are the
defaults of `lrl.PolicyModule`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

SYSTEMS = {"trl": "TRL GRPOTrainer", "lrl-0": "lrl, max_lag 0", "lrl-1": "lrl, max_lag 1"}
"""The systems, with their names in the table."""
MAX_LAG = {"trl": 0, "lrl-0": 0, "lrl-1": 1}

STEPS = 60
GROUPS = 16
"""Prompts of one optimizer step."""
ROLLOUTS = 16
"""Responses to each prompt."""
PROMPT_TOKENS = 16
"""Longest prompt."""
ANSWER_TOKENS = 32
"""Longest response, its end token included."""
TEMPERATURE = 1.0

LR = 1e-4
WARMUP_STEPS = 10
SCHEDULE: Literal["linear"] = "linear"
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0

CHECKPOINT_STEPS = 10
"""Steps between two policies that are kept for scoring."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run; a side gets it as JSON in its only argument. Paths are absolute."""

    seed: int
    max_lag: int
    """0 for TRL, whose trainer is on-policy."""
    steps: int
    policy: str
    """Folder of the warmed-up policy, in the Hugging Face format."""
    prompts: str
    """JSONL with `prompt`, `answer` and `token_ids`, in the order in which steps take them."""
    folder: str
    """Where the run writes `clock.jsonl` and `step-<n>/`."""

    @classmethod
    def read(cls, argument: str) -> Self:
        return cls(**json.loads(argument))

    @property
    def clock(self) -> Path:
        return Path(self.folder) / "clock.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Returns the folder of the policy after `step` optimizer steps; the warmed-up one for
        0."""
        return Path(self.folder) / f"step-{step:03d}" if step else Path(self.policy)

    def is_checkpoint(self, step: int) -> bool:
        return step in checkpoints(self.steps)


@dataclass(frozen=True, kw_only=True)
class SpeedJob(Job):
    """One run that is only timed, by a policy of random weights; its clock has a line for each
    step."""

    lengths: str
    """JSON: for each step the tokens of each response, in the order of the prompts."""
    groups: int
    """Prompts of a step."""
    rollouts: int
    """Responses to each."""
    lr: float
    """Learning rate."""
    pieces: int
    """Number of parts of a step, trained one after another."""


def checkpoints(steps: int) -> list[int]:
    return sorted({*range(0, steps, CHECKPOINT_STEPS), steps})


def finish_reason(token_ids: Sequence[int], eos: int) -> str:
    return "stop" if token_ids and token_ids[-1] == eos else "length"


class Clock:
    """Seconds of training and samples, one line a step in `clock.jsonl`; line 0 has the seconds of
    starting up."""

    def __init__(self, job: Job) -> None:
        self.path = job.clock
        self._started = 0.0
        self._samples = 0

    def start(self, process_began: float) -> None:
        self._write(
            {"step": 0, "samples": 0, "seconds": 0.0, "start_s": time.time() - process_began}
        )
        self._started = time.monotonic()

    def step_done(self, step: int, samples: int) -> None:
        self._samples += samples
        self._write(
            {"step": step, "samples": self._samples, "seconds": time.monotonic() - self._started}
        )

    def _write(self, line: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
