"""The number format in which a tensor travels."""

import torch


def travels_as(
    dtype: torch.dtype, shape: tuple[int, ...], narrow: torch.dtype | None
) -> torch.dtype:
    """Returns the format of a tensor on its way.

    Matrices travel in the generators' format, if that is narrower: a generator would round them
    anyway. Vectors keep the policy's: they are few bytes, and vLLM computes with some of them in
    float32. So do integers.

    Args:
        dtype: The policy's format of the tensor.
        shape: Its shape.
        narrow: The generators' format; None leaves all as they are.
    """
    narrower = narrow is not None and dtype.is_floating_point and narrow.itemsize < dtype.itemsize
    return narrow if narrow is not None and narrower and len(shape) > 1 else dtype
