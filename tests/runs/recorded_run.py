"""A learning run of 30 steps on made-up responses, and the losses it gave when it was recorded.

python -m tests.runs.recorded_run      records them anew, after a change that is meant to change them
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import LlamaConfig

from lrl.advantages import GRPO, Advantages, GroupMean
from lrl.objectives import AIPO, DecoupledPPO, Objective
from lrl.policy import PolicyModule
from lrl.types import Group
from tests import made
from tests.policies import SIZES, FakeStep, fit, pack, save_model

STEPS = 30
RECORD = Path(__file__).with_name("recorded_run.json")
LEARNERS: dict[str, tuple[Objective, Advantages, Any]] = {
    "AIPO": (AIPO(2.0), GroupMean(), "token"),
    "DecoupledPPO": (DecoupledPPO(), GRPO(), "sequence"),
}


class Losses(L.Callback):
    """Loss and gradient norm of every step."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.rows.append(
            [float(trainer.callback_metrics[f"policy/{name}"]) for name in ("loss", "grad_norm")]
        )


def groups(step: int) -> list[Group]:
    """Two groups of four responses, with lags from 0 to 3."""
    rng = random.Random(step)
    found = []
    for index in range(2):
        rollouts = []
        for _ in range(4):
            tokens = [rng.randrange(1, 32) for _ in range(rng.randrange(1, 12))]
            logprobs = [rng.uniform(-5.0, -2.0) for _ in tokens]
            version, reward = step - rng.randrange(4), float(tokens[-1] % 2)
            rollouts.append(made.rollout(tokens, reward, version, logprobs=logprobs))
        found.append(made.group(2 * step + index, *rollouts, prompt=[1 + index, 2, 3]))
    return found


def run(learner: str) -> list[list[float]]:
    """[loss, gradient norm] of each step, on one thread."""
    objective, advantages, normalise_by = LEARNERS[learner]
    threads, losses = torch.get_num_threads(), Losses()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = save_model(Path(folder), LlamaConfig(**SIZES, initializer_range=0.1))
            how: dict[str, Any] = {"objective": objective, "normalise_by": normalise_by}
            policy = PolicyModule(model, lr=1e-3, warmup_steps=3, **how)
            batches = [pack(groups(step), advantages=advantages) for step in range(STEPS)]
            fit(policy, [FakeStep(step) for step in batches], callbacks=[losses])
    finally:
        torch.set_num_threads(threads)
    return losses.rows


if __name__ == "__main__":
    RECORD.write_text(json.dumps({learner: run(learner) for learner in LEARNERS}, indent=1) + "\n")
