"""The average of gradients over ranks: as lrl does it, and in fewer collectives.

Each takes the one rank of the process group for two, and so halves its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager

from lrl.training.gradients import average_over_ranks

BUCKET_BYTES = 2**26


def each(weights: Sequence[nn.Parameter]) -> None:
    """One collective for each gradient: lrl's own."""
    average_over_ranks(weights, 2)


def coalesced(weights: Sequence[nn.Parameter]) -> None:
    """All gradients in one call."""
    gradients = _gradients(weights)
    with _coalescing_manager(async_ops=True) as sums:
        for gradient in gradients:
            dist.all_reduce(gradient)
    sums.wait()
    torch._foreach_div_(gradients, 2)


def in_buckets(weights: Sequence[nn.Parameter]) -> None:
    """Gradients copied into buckets, a collective for each bucket, and copied back."""
    buckets: list[list[Tensor]] = [[]]
    for gradient in _gradients(weights):
        if sum(one.nbytes for one in buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(gradient.view(-1))
    flat = [torch.cat(bucket) for bucket in buckets]
    for sum_of_ranks in [dist.all_reduce(one, async_op=True) for one in flat]:
        sum_of_ranks.wait()
    for bucket, one in zip(buckets, flat, strict=True):
        parts = one.div_(2).split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, list(parts))


def _gradients(weights: Sequence[nn.Parameter]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


WAYS = {"each": each, "coalesced": coalesced, "in_buckets": in_buckets}
