"""Low-rank adapters (LoRA) on their way: the trainer sends two small matrices for each W, a generator merges them.

A generator could also keep them apart, with vLLM's own adapters. But vLLM goes on with the old adapter in every
response that it is writing (seen with vLLM 0.32), so that tokens would carry a version that did not write them.

In a generator of 16 bits most of W + B A - W is smaller than the distance of two numbers, and rounding to the nearest
would leave nearly all of W as it was (`benchmarks/merged_updates.py`). So each number is rounded up with a probability
that makes its mean right, and a matrix product has the sum of thousands of them. The draws of a weight are the same in
every version: the first version is W itself, the next one differs only where the adapters have moved it, and all
generators of a kind hold the same.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

DOWN, UP = ".lora_A", ".lora_B"
"""The ends of names on the wire, behind the name of W in a Hugging Face checkpoint."""


def named(adapters: Iterable[tuple[str, Tensor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields adapters under their names on the wire.

    Args:
        adapters: The name of W [out, in], A [rank, in], and B [out, rank] times its scale.
    """
    for name, down, up in adapters:
        yield name + DOWN, down
        yield name + UP, up


def are_adapters(tensors: Iterable[str]) -> bool:
    """Returns whether an update of tensors with these names has adapters in the place of weights."""
    return any(name.endswith(UP) for name in tensors)


def merged(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields W + B A for each W of `base` that has adapters, and every other weight as it is.

    Args:
        base: The weights of the first version, by their names in a checkpoint.
        adapters: The tensors of `named`.
        dtype: In which the generator computes: float32, bfloat16 or float16. That of the files does not matter.

    Raises:
        ValueError: An adapter is for a weight that `base` does not have; behind the last weight.
    """
    left = set(adapters)
    for name, weight in base:
        if name + UP in left:
            left -= {name + DOWN, name + UP}
            weight = merge(name, weight, adapters[name + DOWN], adapters[name + UP], dtype)
        yield name, weight
    if left:
        raise ValueError(
            f"There is no weight for the adapter {min(left)}: the trainer's adapters are of another model."
        )


def merge(name: str, weight: Tensor, down: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns W + B A in `dtype` on the device of A; see `merged`."""
    with torch.autocast(down.device.type, enabled=False):  # within a step of the trainer it may be on
        whole = weight.to(down.device).float() + up.float() @ down.float()
    return rounded(whole, dtype, seed=zlib.crc32(name.encode()))


def rounded(weight: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Returns a float32 weight in `dtype`, each number rounded up or down with the mean that it was.

    `seed` stands for the draws. A number that `dtype` has stays.
    """
    if dtype == torch.float32:
        return weight
    dropped = 23 + round(math.log2(torch.finfo(dtype).eps))  # of the 23 bits behind a float32's point
    draw = torch.Generator(weight.device).manual_seed(seed)
    bits = torch.randint(1 << dropped, weight.shape, dtype=torch.int32, device=weight.device, generator=draw)
    bits += weight.view(torch.int32)
    return (bits & -(1 << dropped)).view(torch.float32).to(dtype)
