"""The policy's weights as they travel: which number format, in which order.

vLLM packs tensors of any format one after the other into a buffer of bytes, and can view one as its
own format only where its size divides the offset. So tensors of an odd size come last, the widest
of them first; then every offset fits, wherever a buffer begins. All others keep the policy's order,
in which a sharded policy gathers each of them once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lrl.training.pieces import Piece

Pieces = Callable[[], Iterator["Piece"]]
"""Yields the rows of the weights that this rank sends, afresh at every call."""
WholeWeights = Callable[[], Iterator[tuple[str, Tensor]]]
"""Yields the policy's weights afresh at every call: Hugging Face names, full tensors."""


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


def tensor_specs(weights: WholeWeights, narrow: torch.dtype | None) -> list[TensorSpec]:
    """Returns the specs of `cast_for_transfer`'s tensors, in the order of a wire; reads all weights
    once."""
    found = [
        TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        for name, tensor in cast_for_transfer(weights, narrow)
    ]
    odd = unaligned(found)
    return [one for one in found if one not in odd] + odd


def unaligned(found: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Returns the tensors after which the widest numbers would not fit, in their order on the
    wire."""
    widest = max((one.dtype.itemsize for one in found), default=1)
    return sorted(
        (one for one in found if one.nbytes % widest), key=lambda one: -one.dtype.itemsize
    )


def cast_for_transfer(
    weights: WholeWeights, narrow: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights as they are now, in the format in which they travel and the policy's
    order."""
    for name, tensor in weights():
        yield name, tensor.detach().to(transfer_dtype(tensor.dtype, tuple(tensor.shape), narrow))


class Wire:
    """The weights of one policy, to be read many times.

    Args:
        weights: The policy's; read once here, for names, formats and shapes, which stay.
        narrow: The generators' number format.
    """

    def __init__(self, weights: WholeWeights, narrow: torch.dtype) -> None:
        self._weights = weights
        self._narrow = narrow
        self.tensors = tensor_specs(weights, narrow)
        """What `__iter__` yields, in its order."""

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(one.nbytes for one in self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors as they are now."""
        kept: dict[str, Tensor | None] = {one.name: None for one in unaligned(self.tensors)}
        for name, tensor in cast_for_transfer(self._weights, self._narrow):
            if name in kept:
                kept[name] = tensor
            else:
                yield name, tensor
        for name, last in kept.items():
            assert last is not None, "the policy's tensors stay the same"
            yield name, last

    def source(self) -> Any:
        """Returns it as vLLM's `WeightSource`, of vLLM 0.32 and of 0.33."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        wire = self
        parameters = [ParamMeta(*spec) for spec in wire.tensors]

        def declare(source: WeightSource) -> list[ParamMeta]:
            return parameters

        class WireSource(WeightSource):
            # 0.33 raises a TypeError at the class statement for a method, 0.32 calls one.
            metadata: Any = (
                cached_property(declare) if hasattr(WeightSource, "iter_full") else declare
            )

            def iter_full(self) -> Iterator[tuple[str, Tensor]]:
                return iter(wire)

            __iter__ = iter_full  # the name in 0.32

        return WireSource()
