"""Forward passes that the ranks share: each computes some of the batches, and rank 0 gets all
results."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lrl.distributed.ranks import Ranks
from lrl.training.collate import blank
from lrl.training.sharding import Sharding
from lrl.types import MicroBatch


def shared_passes(
    batches: Sequence[MicroBatch],
    compute: Callable[[MicroBatch], Tensor],
    device: torch.device,
    ranks: Ranks,
    sharding: Sharding | None,
) -> list[Tensor]:
    """Returns the result of `compute` for each batch on rank 0, and nothing on the others; all
    ranks call it.

    Args:
        batches: The same on every rank.
        compute: Computes one batch on this rank.
        device: Where `compute` wants its batch.
        ranks: The ranks that train.
        sharding: The division of the weights that `compute` reads; None if every rank has them all.
    """
    size = ranks.size if sharding is None else sharding.data_parallel_size
    together = ranks.size // size  # neighbours compute one batch together
    share = list(batches[ranks.rank // together :: size])
    if sharding is not None and len(share) * size < len(batches):
        share.append(blank())  # all ranks take part in a pass
    found = ranks.gather([compute(each.to(device)) for each in share])[::together]
    if not found:
        return []
    return [found[number % size][number // size] for number in range(len(batches))]
