"""The passes of one optimizer step without a trainer, by a policy that is whole or in parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lrl
from benchmarks.random_policy import random_group, random_tokens
from lrl.advantages import Baseline
from lrl.rollouts.packing import Packer
from lrl.system.ranks import Ranks
from lrl.training.collate import blank
from lrl.training.optimizers import scale_and_clip
from lrl.training.sharding import Sharding, on_cpu, whole_on
from lrl.types import Group, MicroBatch, Prompt

MAX_NORM = 1.0
GROUPS, RESPONSES = 4, 2
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 96
MICRO_BATCH_TOKENS = 256
"""Two responses: each of two ranks has two passes a step."""


def groups(vocabulary: int) -> Iterator[Group]:
    draw = random.Random(0)
    lengths = [RESPONSE_TOKENS] * RESPONSES
    for index in range(GROUPS):
        tokens = random_tokens(draw, PROMPT_TOKENS, vocabulary)
        prompt = Prompt(id=index, token_ids=tokens, text="")
        yield random_group(draw, index, prompt, lengths=lengths, vocabulary=vocabulary)


class NoBaseline(Baseline):
    """Rewards as they are, all above 0: less a mean, the terms of the loss would cancel out, and
    what is left would be as small as rounding."""

    def __call__(self, rewards: Tensor) -> Tensor:
        return rewards


class Policy(lrl.PolicyModule):
    """A policy without a trainer, whole or in parts."""

    ranks: Any = None
    sharding: Any = None
    device_of_use: Any = None

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        ranks: Ranks | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(str(folder))
        self.ranks, self.sharding = ranks or Ranks(), sharding
        self.device_of_use = device
        self.configure_model()


class Expected(NamedTuple):
    """What the passes of the whole policy have given."""

    loss: float
    norm: float
    gradient: dict[str, Tensor]

    def off(self, loss: float, norm: float, gradient: dict[str, Tensor]) -> dict[str, float]:
        named = self.gradient.items()
        away = sum(float((gradient[name] - one).square().sum()) for name, one in named)
        length = sum(float(one.square().sum()) for _, one in named)
        return {
            "loss_off": abs(loss / self.loss - 1),
            "norm_off": abs(norm / self.norm - 1),
            "gradient_off": (away / length) ** 0.5,
        }


def micro_batches(vocabulary: int) -> tuple[list[MicroBatch], int]:
    packer = Packer(MICRO_BATCH_TOKENS, NoBaseline(), 1.0)
    rounds = [one for group in groups(vocabulary) for one in packer.add(group)]
    return [one for each in [*rounds, *packer.flush()] for one in each if one], packer.tokens


def passes(policy: Policy, micros: Sequence[MicroBatch], tokens: int) -> tuple[float, float]:
    """Runs the passes of a step as `PolicyModule.training_step` does, without its update; returns
    the loss, and the norm of the gradient before its clip."""
    policy.zero_grad()
    loss = torch.zeros((), device=policy.device_of_use)
    for micro in micros:
        one = policy.compute_loss(micro.to(policy.device_of_use))
        one.backward()
        loss += one.detach()
    if policy.sharding is not None and policy.sharding.reduce_gradients == "once":
        with policy.sharding.reduces(policy):
            policy.blank_loss(blank().to(policy.device_of_use)).backward()
    scale = policy.data_parallel_size / tokens
    norm = scale_and_clip(policy.parameters(), scale, MAX_NORM)
    return loss.item() / tokens, norm.item()


def gradient_of(policy: Policy) -> dict[str, Tensor]:
    named = ((name, one.grad) for name, one in policy.named_parameters() if one.grad is not None)
    return on_cpu((name, whole_on(one).clone()) for name, one in named)
