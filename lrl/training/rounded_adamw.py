"""AdamW for bfloat16 weights.

At a learning rate of 1e-6 nearly every update is smaller than half the distance of two bfloat16
numbers: rounded to the nearest, the weight would stay as it was. So an update is computed in float32
and each number rounded up or down with the probability that makes its mean right (`merging.rounded`).
A parameter takes 8 bytes: weight, gradient and both moments; a copy of the weights in float32 beside
them would take as much as training in float32 under autocast does.
"""

import zlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from lrl.training.merging import rounded
from lrl.training.sharding import own_part

SLICE = 2**24
"""Numbers of a weight that are in float32 at once: about 0.5 GB of working space."""


class RoundedAdamW(torch.optim.AdamW):
    """AdamW that computes in float32, and rounds weights and moments to their own dtype at random,
    right in the mean.

    The draws follow from `seed`, the number of updates, and the place of a weight: a run that resumes
    draws what it would have drawn. Ranks that hold the same numbers need the same seed.
    Both are in the parameter groups of a checkpoint. `amsgrad`, `maximize`, `capturable` and
    `differentiable` have no effect.
    """

    def __init__(self, params: Any, seed: int, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group.update(seed=seed, updates=0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Does an update; returns what `closure` does."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for number, group in enumerate(self.param_groups):
            group["updates"] += 1
            found: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *found)
            found.pop(4)  # of amsgrad
            for index, (*tensors, count) in enumerate(zip(*found, strict=True)):
                key = f"{group['seed']} {group['updates']} {number} {index} {_part(tensors[0])}"
                _update(group, tensors, count, key)
        return loss


def _update(group: dict[str, Any], tensors: list[Tensor], count: Tensor, key: str) -> None:
    flat = [own_part(tensor).view(-1).split(SLICE) for tensor in tensors]
    for number, slices in enumerate(zip(*flat, strict=True)):
        in_float32 = [one.float() for one in slices]
        weight, gradient, mean, square = in_float32
        adamw(
            params=[weight],
            grads=[gradient],
            exp_avgs=[mean],
            exp_avg_sqs=[square],
            max_exp_avg_sqs=[],
            state_steps=[count.clone()],
            foreach=group["foreach"],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, one, found in zip("wgms", slices, in_float32, strict=True):
            if found is not gradient:
                seed = zlib.crc32(f"{key} {number} {name}".encode())
                one.copy_(rounded(found, one.dtype, seed))
    count += 1


def _part(weight: Tensor) -> tuple[int, ...]:
    """Returns which part of a sharded weight this rank has; replicas have the same."""
    if not isinstance(weight, DTensor):
        return ()
    places = cast("list[int]", weight.device_mesh.get_coordinate())
    return tuple(
        place
        for place, placement in zip(places, weight.placements, strict=True)
        if not placement.is_replicate()
    )
