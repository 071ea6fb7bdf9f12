"""Low-rank adapters (LoRA) on their way through a file: the trainer sends two small matrices for
each W, a generator merges them.

A generator could also keep them apart, with vLLM's own adapters. But vLLM keeps the old adapter
in every response that it is writing (seen with vLLM 0.32), so that tokens would carry a
version that did not write them.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lrl.training.merging import DOWN, UP, merge


def named(adapters: Iterable[tuple[str, Tensor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields adapters under their names on the wire.

    Args:
        adapters: The name of W [out, in], A [rank, in], and B [out, rank] times its scale.
    """
    for name, down, up in adapters:
        yield name + DOWN, down
        yield name + UP, up


def are_adapters(tensors: Iterable[str]) -> bool:
    """Returns whether an update of tensors with these names has adapters in the place of
    weights."""
    return any(name.endswith(UP) for name in tensors)


def merged(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields W + B A for each W of `base` that has adapters, and every other weight as it is.

    Args:
        base: The weights of the first version, by their names in a checkpoint.
        adapters: The tensors of `named`.
        dtype: In which the generator computes: float32, bfloat16 or float16. That of the files does
            not matter.

    Raises:
        ValueError: An adapter is for a weight that `base` does not have; after the last weight.
    """
    left = set(adapters)
    for name, weight in base:
        if name + UP in left:
            left -= {name + DOWN, name + UP}
            weight = merge(
                name, weight, down=adapters[name + DOWN], up=adapters[name + UP], dtype=dtype
            )
        yield name, weight
    if left:
        raise ValueError(
            f"There is no weight for the adapter {min(left)}: the trainer's adapters are of "
            "another model."
        )
