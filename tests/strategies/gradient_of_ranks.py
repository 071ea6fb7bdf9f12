"""One rank of several that train a step together, without a trainer. Arguments: policy folder and
folder.

torchrun's variables say which rank it is. Rank 0 has the groups. Each writes the gradient that it
would clip.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lrl.advantages import Advantages, GroupMean
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import RankStream, StepStream
from lrl.system.stopwatch import Stopwatch
from lrl.training import optimizers
from lrl.training.optimizers import sum_over_ranks
from lrl.types import Group
from tests.policies import make_group, opened
from tests.strategies.forked_ranks import met

GROUPS = [make_group(number) for number in range(9)]
BUDGET = 48


def main(model: str, folder: Path) -> None:
    with met(folder) as them:
        rank, ranks, policy = them.rank, them.size, opened(model)
        of_rank: Any = SimpleNamespace(
            ranks=them, data_parallel_size=ranks, prepare=lambda *settings: None
        )
        whole = stream(of_rank, Arriving(GROUPS), len(GROUPS), GroupMean())
        step = RankStream(of_rank) if rank else whole
        passes = 0
        for micro in step:
            policy.compute_loss(micro).backward()
            passes += 1
        sum_over_ranks(policy.parameters(), ranks)
        weights = [
            torch.zeros_like(weight) if weight.grad is None else weight.grad
            for weight in policy.parameters()
        ]
        gradient = torch.cat([weight.flatten() for weight in weights]) / step.num_tokens
        torch.save(
            {"gradient": gradient, "passes": passes, "sequences": step.num_sequences},
            folder / f"{rank}.pt",
        )


def sums(folder: Path) -> None:
    """Sums gradients of two dtypes in buckets of one or a few, and each by itself; the last rank
    has none, and one weight has none anywhere. Each rank writes both sums."""
    with met(folder) as them:
        optimizers.BUCKET_BYTES = 600
        torch.manual_seed(them.rank)
        kinds = [torch.float32] * 9 + [torch.bfloat16] * 4 + [torch.float32] * 3
        weights = [
            torch.nn.Parameter(torch.zeros(7 * size + 1, dtype=kind))
            for size, kind in enumerate(kinds)
        ]
        for weight in weights[1:]:
            weight.grad = None if them.rank == them.size - 1 else torch.randn_like(weight)
        each = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in weights]
        for gradient in each:
            dist.all_reduce(gradient)
        sum_over_ranks(weights, them.size)
        found = [weight.grad for weight in weights]
        torch.save({"found": found, "each": each}, folder / f"{them.rank}.pt")


class Arriving:
    """Groups, each after what is done first."""

    def __init__(self, groups: Sequence[Group], first: Callable[[], Any] = lambda: None) -> None:
        self.coming = iter(copy.deepcopy(groups))  # each policy adds its own values
        self.first = first

    def next_group(self, step: int) -> Group:
        self.first()
        return next(self.coming)

    def give_up(self, group: Group) -> None: ...

    def raise_if_stopped(self) -> None: ...


def stream(
    policy: Any, source: Arriving, groups: int, advantages: Advantages, blanks: bool = False
) -> StepStream:
    size = policy.data_parallel_size
    return StepStream(
        0,
        groups,
        source=source,
        policy=policy,
        learners=Learners(advantages),
        packer=Packer(BUDGET, advantages, 1.0, data_parallel_size=size, blanks=blanks),
        stopwatch=Stopwatch(),
    )
