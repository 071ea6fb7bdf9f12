"""The policy's weights as they travel: which number format, in which order.

The format is that of `lrl.weights.narrowing`. vLLM packs tensors of any format one behind the other into a buffer of
bytes, and can view one as its own format only where its size divides the offset. So the widest come first; then every
offset fits, wherever a buffer begins.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrl.weights.control import Weights
from lrl.weights.narrowing import travels_as


class Described(NamedTuple):
    """A tensor on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Wire:
    """The weights of one policy, to be read many times.

    Args:
        weights: The policy's; read once here, for names, formats and shapes, which stay.
        narrow: The generators' number format.
    """

    def __init__(self, weights: Weights, narrow: torch.dtype) -> None:
        self._weights, self._narrow = weights, narrow
        found = [Described(name, self._format(tensor), tuple(tensor.shape)) for name, tensor in weights()]
        self.tensors = sorted(found, key=lambda one: -one.dtype.itemsize)
        """What `__iter__` yields, in its order."""

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(one.nbytes for one in self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors as they are now; one pass over the policy for each size of a number."""
        for size in dict.fromkeys(one.dtype.itemsize for one in self.tensors):
            for name, tensor in self._weights():
                if self._format(tensor).itemsize == size:
                    yield name, tensor.detach().to(self._format(tensor))

    def _format(self, tensor: Tensor) -> torch.dtype:
        return travels_as(tensor.dtype, tuple(tensor.shape), self._narrow)

    def source(self) -> Any:
        """Returns it as vLLM's `WeightSource`."""
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        wire = self

        class WireSource(WeightSource):
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(*one) for one in wire.tensors]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(wire)

        return WireSource()
