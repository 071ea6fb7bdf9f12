"""One rank of several that read the policy together, without a trainer.

Rank 0 reads the weights in every way. Each rank writes how often its own networks computed and gave
their weights.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lrl
from lrl.distributed.collective import follow
from lrl.distributed.ranks import Ranks
from tests.policies import make_group, opened
from tests.strategies.forked_ranks import meet

BUDGET = 1
"""Tokens of a pass: each response has its own, so a group of four has some for every rank."""


def main(model: str, folder: Path) -> None:
    them = meet(folder)
    policy = OfRanks(model, them)
    reads = counted(policy)
    found: dict[str, Any] = {}
    if them.rank == 0:
        group = make_group(0)
        policy.prepare(group, 1.0, BUDGET)
        found["reference"] = [rollout.reference_logprobs for rollout in group.rollouts]
        found["logprobs"] = policy.prompt_logprobs([1, 2, 3, 4])
        found["weights"] = dict(policy.sent_weights())
        policy.export(folder / "policy")
    else:
        with suppress(RuntimeError):
            policy.prompt_logprobs([1, 2, 3, 4])
            found["alone"] = "a rank has read by itself"
    follow(policy)
    torch.save(found | {"reads": dict(reads)}, folder / f"{them.rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


class OfRanks(lrl.PolicyModule):
    """A policy with ranks and without a trainer."""

    ranks: Any = None

    def __init__(self, model: str, ranks: Ranks) -> None:
        super().__init__(model, reference=lrl.Reference())
        self.ranks = ranks
        self.configure_model()
        self.setup("fit")


def counted(policy: Any) -> Counter[str]:
    reads: Counter[str] = Counter()
    policy.reference.network.model.register_forward_pre_hook(lambda *_: reads.update(["reference"]))
    policy.network.model.register_forward_pre_hook(lambda *_: reads.update(["forward"]))
    policy.network.register_state_dict_pre_hook(lambda *_: reads.update(["weights"]))
    return reads


def alone(model: str) -> dict[str, Any]:
    """Returns the same reads by a single rank."""
    policy, group = opened(model, reference=lrl.Reference()), make_group(0)
    policy.setup("fit")
    policy.prepare(group, 1.0, BUDGET)
    return {
        "reference": [rollout.reference_logprobs for rollout in group.rollouts],
        "logprobs": policy.prompt_logprobs([1, 2, 3, 4]),
        "weights": dict(policy.sent_weights()),
    }
