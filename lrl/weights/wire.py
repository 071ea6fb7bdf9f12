"""The policy's weights as they travel: which number format, in which order.

In a file each tensor can be viewed as its own format only where its size divides its place. So
tensors of an odd size come last, the widest of them first; all others keep the policy's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from lrl.training.pieces import Piece

Pieces = Callable[[], Iterator["Piece"]]
"""Yields the rows of the weights that this rank sends, afresh at every call."""


class TensorSpec(NamedTuple):
    """A tensor on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is a number of the first dimension; a scalar is one."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def transfer_dtype(
    dtype: torch.dtype, shape: tuple[int, ...], narrow: torch.dtype | None
) -> torch.dtype:
    """Returns the number format in which a tensor travels.

    Matrices travel in the generators' format, if that is narrower: a generator would round them
    anyway. Vectors keep the policy's: they are few bytes, and vLLM computes with some of them in
    float32. So do integers.

    Args:
        dtype: The policy's format of the tensor.
        shape: Its shape.
        narrow: The generators' format; None leaves all as they are.
    """
    if narrow is None or len(shape) < 2 or not dtype.is_floating_point:
        return dtype
    return narrow if narrow.itemsize < dtype.itemsize else dtype


def spec_of(piece: Piece, narrow: torch.dtype | None) -> TensorSpec:
    """Returns the whole tensor of a piece, as it travels."""
    dtype = transfer_dtype(piece.rows.dtype, piece.shape, narrow)
    return TensorSpec(piece.name, dtype, piece.shape)


def unaligned(found: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Returns the tensors after which the widest numbers would not fit, in their order on the
    wire."""
    widest = max((one.dtype.itemsize for one in found), default=1)
    return sorted(
        (one for one in found if one.nbytes % widest), key=lambda one: -one.dtype.itemsize
    )
