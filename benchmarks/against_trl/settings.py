"""The settings of both sides, and their processes. Both environments import it, so it needs only
Python.

Learning rate, schedule, batch and lengths are those of `recipes/quickstart.yaml`; the rest are the
defaults of `lrl.PolicyModule`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
TRL, ACCELERATE = "1.16.0", "1.15.0"
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

LR = 1e-4
WARMUP_STEPS = 10
SCHEDULE: Literal["linear"] = "linear"
# Those that lrl has if nothing is said.
TEMPERATURE = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0

CHECKPOINT_STEPS = 10
"""Steps between two policies that are kept for scoring."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run; a side gets it as JSON in its only argument. Paths are absolute."""

    seed: int = 0
    max_lag: int = 0
    """0 for TRL, whose trainer is on-policy."""
    steps: int
    policy: str
    """Folder of the first policy, in the Hugging Face format."""
    prompts: str
    """JSONL with `prompt`, and where it learns `answer` and `token_ids`, in the order in which
    steps take them."""
    folder: str
    """Where the run writes `clock.jsonl` and `step-<n>/`."""
    lengths: str = ""
    """Of a run that is only timed: JSON, for each step the tokens of each response, in the order of
    the prompts. Empty for a run that learns."""
    groups: int = GROUPS
    rollouts: int = ROLLOUTS
    lr: float = LR
    pieces: int = 1
    """Number of parts of a step that TRL trains one after another."""

    def run(self, python: Path | str, side: str, threads: int | None) -> None:
        """Runs the job in a process of this Python."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        if threads is not None:
            own["OMP_NUM_THREADS"] = str(threads)
        words = [str(python), "-m", f"benchmarks.against_trl.{side}", json.dumps(asdict(self))]
        subprocess.run(words, cwd=ROOT, env=own, check=True)

    @property
    def clock(self) -> Path:
        return Path(self.folder) / "clock.jsonl"

    def checkpoint(self, step: int) -> Path:
        """Returns the folder of the policy after `step` optimizer steps; the first one for 0."""
        return Path(self.folder) / f"step-{step:03d}" if step else Path(self.policy)

    def is_checkpoint(self, step: int) -> bool:
        return not self.lengths and step in checkpoints(self.steps)


def trl_python(folder: Path) -> Path:
    """Returns the Python of TRL's own environment; makes it on first use.

    Torch, transformers and other packages of both sides have the versions of
    `requirements/cpu.txt`, so they make no difference between the two.
    """
    python, stamp = folder / "bin" / "python", folder / f"trl-{TRL}"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        wanted = [f"trl=={TRL}", f"accelerate=={ACCELERATE}"]
        wanted += ["torch", "transformers", "datasets", "psutil"]
        constraints = str(ROOT / "requirements" / "cpu.txt")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, "-c", constraints, *wanted], check=True)
        stamp.touch()
    return python


def checkpoints(steps: int) -> list[int]:
    return sorted({*range(0, steps, CHECKPOINT_STEPS), steps})


def finish_reason(token_ids: Sequence[int], eos: int) -> str:
    return "stop" if token_ids and token_ids[-1] == eos else "length"


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Clock:
    """Seconds of training and samples, one line a step in `clock.jsonl`; line 0 has the seconds of
    starting up."""

    def __init__(self, job: Job) -> None:
        self.path = job.clock
        self._started = 0.0
        self._samples = 0

    def start(self, process_began: float) -> None:
        start_s = time.time() - process_began
        self._write({"step": 0, "samples": 0, "seconds": 0.0, "start_s": start_s})
        self._started = time.monotonic()

    def step_done(self, step: int, samples: int, **more: float) -> None:
        self._samples += samples
        seconds = time.monotonic() - self._started
        self._write({"step": step, "samples": self._samples, "seconds": seconds, **more})

    def _write(self, line: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
