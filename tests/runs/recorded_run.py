"""A learning run of 30 steps on made-up responses, and the losses it gave when it was recorded.

python -m tests.runs.recorded_run      records them anew, after a change that is meant to change them
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from lrl.advantages import GRPO, Advantages, GroupMean
from lrl.objectives import AIPO, DecoupledPPO, Objective
from lrl.policy import PolicyModule
from lrl.types import Group
from tests import made
from tests.policies import FakeStep, fit, pack
from tests.tiny_policies import save_tiny

STEPS = 30
RECORD = Path(__file__).with_name("recorded_run.json")
LEARNERS: dict[str, tuple[Objective, Advantages, Any]] = {
    "AIPO": (AIPO(2.0), GroupMean(), "token"),
    "DecoupledPPO": (DecoupledPPO(), GRPO(), "sequence"),
}


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


def step_of(number: int, advantages: Advantages) -> FakeStep:
    return FakeStep(pack(groups(number), advantages=advantages))


def run(learner: str) -> list[list[float]]:
    """[loss, gradient norm] of each step."""
    objective, advantages, normalise_by = LEARNERS[learner]
    sizes = {"vocab_size": 32, "pad_token_id": None}
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny("llama", Path(folder), seed=1, initializer_range=0.1, **sizes)
        policy = PolicyModule(
            model, objective=objective, normalise_by=normalise_by, lr=1e-3, warmup_steps=3
        )
        rows = fit(policy, [step_of(number, advantages) for number in range(STEPS)])
    return [[row["policy/loss"], row["policy/grad_norm"]] for row in rows]


if __name__ == "__main__":
    torch.set_num_threads(1)
    RECORD.write_text(json.dumps({learner: run(learner) for learner in LEARNERS}, indent=1) + "\n")
