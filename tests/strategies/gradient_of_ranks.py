"""One rank of several that train a step together, without a trainer. Arguments: policy folder and
folder.

torchrun's variables say which rank it is. Rank 0 has the groups. Each writes the gradient that it
would clip.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lrl.advantages import GroupMean
from lrl.distributed.ranks import Ranks
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer
from lrl.rollouts.stream import GroupSource, RankStream, StepStream
from lrl.system.stopwatch import Stopwatch
from lrl.training.optimizers import average_over_ranks
from lrl.types import Group
from tests.policies import make_group, opened
from tests.strategies.forked_ranks import meet

GROUPS = [make_group(number) for number in range(9)]
BUDGET = 48


def main(model: str, folder: Path) -> None:
    them = meet(folder)
    rank, ranks, policy = them.rank, them.size, opened(model)
    step = RankStream(SimpleNamespace(ranks=them)) if rank else stream(them)
    passes = 0
    print("trains", flush=True)
    for micro in step:
        policy.compute_loss(micro).backward()
        passes += 1
    average_over_ranks(policy.parameters(), ranks)
    weights = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad
        for weight in policy.parameters()
    ]
    gradient = torch.cat([weight.flatten() for weight in weights]) * ranks / step.num_tokens
    torch.save(
        {"gradient": gradient, "passes": passes, "sequences": step.num_sequences},
        folder / f"{rank}.pt",
    )
    dist.barrier()
    dist.destroy_process_group()


class Arriving(GroupSource):
    """The groups, each `SLOW` seconds after the one before."""

    def __init__(self) -> None:
        self.coming = iter(GROUPS)

    def next_group(self, step: int) -> Group:
        time.sleep(float(os.environ.get("SLOW", 0)))
        return next(self.coming)


def stream(ranks: Ranks) -> StepStream:
    policy: Any = SimpleNamespace(
        ranks=ranks, data_parallel_size=ranks.size, prepare=lambda *settings: None
    )
    return StepStream(
        0,
        len(GROUPS),
        source=Arriving(),
        policy=policy,
        learners=Learners(GroupMean()),
        packer=Packer(BUDGET, GroupMean(), 1.0, data_parallel_size=ranks.size),
        stopwatch=Stopwatch(),
    )
