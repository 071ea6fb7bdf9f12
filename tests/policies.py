"""Policies, groups and steps for tests that train without generators."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lrl.advantages import Advantages, GroupMean
from lrl.objectives.base import denominator
from lrl.policy import PolicyModule
from lrl.rollouts.packing import Packer
from lrl.types import Group, MicroBatch
from tests import made


def opened(model: str, **settings: Any) -> PolicyModule:
    policy = PolicyModule(model, **settings)
    policy.configure_model()
    return policy


# ---- groups and micro-batches


def make_group(
    index: int,
    responses: int = 4,
    version: int = 0,
    *,
    lengths: Sequence[int] = (),
    prompt: Sequence[int] = (),
    tokens: int = 32,
) -> Group:
    """Returns a group of random responses, of other lengths and after another prompt for each index,
    unless they are given."""
    rng = random.Random(index)
    rollouts = []
    for n in lengths or [rng.randrange(1, 12) for _ in range(responses)]:
        token_ids = [rng.randrange(1, tokens) for _ in range(n)]
        logprobs = [-8 * rng.random() for _ in range(n)]
        reward = float(rng.randrange(3))
        rollouts.append(made.rollout(token_ids, reward, version, logprobs=logprobs))
    prompt = prompt or [rng.randrange(1, 32) for _ in range(rng.randrange(1, 6))]
    return made.group(index, *rollouts, prompt=prompt)


GROUPS = [make_group(i) for i in range(4)]


def sizes(
    budget: int = 10_000,
    temperature: float = 1.0,
    advantages: Advantages | None = None,
    **settings: Any,
) -> Packer:
    """Returns a packer, which also says the sizes of a policy's passes."""
    return Packer(budget, advantages or GroupMean(), temperature, **settings)


def packed(packer: Packer, groups: Sequence[Group]) -> list[MicroBatch]:
    """Returns all micro-batches of some groups."""
    rounds = [each for group in groups for each in packer.add(group)]
    return [micro for each in (*rounds, *packer.flush()) for micro in each if micro is not None]


def pack(groups: Sequence[Group], budget: int = 64, *how: Any, **settings: Any) -> list[MicroBatch]:
    return packed(sizes(budget, *how, **settings), groups)


def prepared(policy: PolicyModule, groups: list[Group], *how: Any, **settings: Any) -> list[Group]:
    """Returns the groups with what reference and critic say of them."""
    if not hasattr(policy.reference, "network"):
        policy.setup("fit")
    for group in groups:
        policy.prepare(group, sizes(*how, **settings))
    return groups


# ---- steps


@dataclass
class FakeStep:
    batches: list[MicroBatch]

    def __iter__(self) -> Iterator[MicroBatch]:
        yield from self.batches

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)

    @property
    def num_sequences(self) -> int:
        return sum(batch.num_sequences for batch in self.batches)

    def finish(self) -> None:
        """Does nothing."""


def trainer(saves_in: Path | None = None, **settings: Any) -> L.Trainer:
    """Returns a quiet trainer that saves `step=N.ckpt` behind every step, if a folder is given."""
    if saves_in is not None:
        saving = ModelCheckpoint(saves_in, "{step}", every_n_train_steps=1, save_top_k=-1)
        settings["callbacks"] = [*settings.get("callbacks", ()), saving]
        settings["enable_checkpointing"] = True
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{"accelerator": "cpu", "max_steps": 1, **quiet, **settings})


def loader(steps: Sequence[FakeStep]) -> DataLoader[FakeStep]:
    return DataLoader(steps, batch_size=None)  # type: ignore[arg-type]


def fit(
    policy: PolicyModule,
    steps: Sequence[FakeStep],
    ckpt_path: str | None = None,
    *,
    callbacks: Sequence[L.Callback] = (),
    **settings: Any,
) -> list[dict[str, float]]:
    """Trains; returns the metrics after each step."""
    found = []

    def seen(running: L.Trainer, *_: Any) -> None:
        found.append({name: value.item() for name, value in running.callback_metrics.items()})

    callbacks = [*callbacks, LambdaCallback(on_train_batch_end=seen)]
    running = trainer(**{"max_steps": len(steps), "callbacks": callbacks, **settings})
    running.fit(policy, loader(steps), ckpt_path=ckpt_path, weights_only=True)
    return found


def flat(tensors: Any) -> Tensor:
    """Returns all numbers of some tensors, without gradient."""
    return torch.cat([one.detach().flatten() for one in tensors])


def flat_gradient(module: torch.nn.Module) -> Tensor:
    return flat(weight.grad for weight in module.parameters() if weight.grad is not None)


def gradient(policy: PolicyModule, batches: list[MicroBatch]) -> Tensor:
    """Returns the gradient of one step on `batches`, before clipping."""
    policy.zero_grad()
    for batch in batches:
        policy.compute_loss(batch).backward()
    divisor = denominator(policy.normalise_by, FakeStep(batches))
    return flat_gradient(policy) / divisor
