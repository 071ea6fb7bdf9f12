"""The sum W + B A of a weight and its adapters, in the number format of the model that uses it.

In 16 bits most of B A is smaller than the distance of two numbers: rounded to the nearest, nearly
all of W would stay as it was (`benchmarks/merged_updates.py` at tag before-0.3). So each number is
rounded up with the probability that makes its mean right. The draws of a weight are the same in
every version: the first version is W itself, the next one differs only where the adapters have
moved it, and all generators of a kind hold the same.
"""

import math
import zlib

import torch
from torch import Tensor

DOWN, UP = ".lora_A", ".lora_B"
"""The ends of names on the wire, after the name of W in a Hugging Face checkpoint."""


def merge(
    name: str,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    dtype: torch.dtype,
    start: int = 0,
    rows: int | None = None,
) -> Tensor:
    """Returns W + B A in `dtype` on the device of A; see `lrl.weights.version_file`.

    W and B may be some rows, from `start` on, of `rows`.
    """
    # Within a step of the trainer it may be on.
    with torch.autocast(down.device.type, enabled=False):
        whole = weight.to(down.device).float() + up.float() @ down.float()
    return rounded(whole, dtype, seed=zlib.crc32(name.encode()), start=start, rows=rows)


def rounded(
    weight: Tensor, dtype: torch.dtype, seed: int, start: int = 0, rows: int | None = None
) -> Tensor:
    """Returns a float32 weight in `dtype`, each number rounded up or down with the mean that it
    was.

    `seed` stands for the draws. A number that `dtype` has stays. Some rows of a weight, from
    `start` on, of `rows`, are rounded as in the whole.
    """
    if dtype == torch.float32:
        return weight
    # Of the 23 bits after a float32's point.
    dropped = 23 + round(math.log2(torch.finfo(dtype).eps))
    draw = torch.Generator(weight.device).manual_seed(seed)
    shape = weight.shape if rows is None else (rows, *weight.shape[1:])
    bits = torch.randint(
        1 << dropped, shape, dtype=torch.int32, device=weight.device, generator=draw
    )
    if rows is not None:
        bits = bits[start : start + len(weight)]
    bits += weight.view(torch.int32)
    return (bits & -(1 << dropped)).view(torch.float32).to(dtype)
