"""The policy's weights as they travel: which number format, in which order.

- A tensor in the policy's number format travels in the generators', if that one is narrower: the generator would round
  it anyway. What the policy keeps in another format (a bias in float32, a table of integers) travels unchanged, because
  the generator may keep it as well.
- vLLM packs tensors of any format one behind the other into a buffer of bytes, and can view one as its own format only
  where its size divides the offset. So the widest come first; then every offset fits, wherever a buffer begins.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lrl.weights.control import Weights


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
        self._weights = weights
        found = [Described(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]
        usual = _usual([one for one in found if one.dtype.is_floating_point])
        self._cast = {usual: narrow} if usual is not None and narrow.itemsize < usual.itemsize else {}
        sent = [one._replace(dtype=self._cast.get(one.dtype, one.dtype)) for one in found]
        self.tensors = sorted(sent, key=lambda one: -one.dtype.itemsize)
        """What `__iter__` yields, in its order."""

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max(one.nbytes for one in self.tensors)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields names and tensors as they are now; one pass over the policy for each size of a number, mostly one."""
        for size in dict.fromkeys(one.dtype.itemsize for one in self.tensors):
            for name, tensor in self._weights():
                dtype = self._cast.get(tensor.dtype, tensor.dtype)
                if dtype.itemsize == size:
                    yield name, tensor.detach().to(dtype)

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


def _usual(found: list[Described]) -> torch.dtype | None:
    """Returns the number format that most numbers have; None without any tensor."""
    numbers: Counter[torch.dtype] = Counter()
    for one in found:
        numbers[one.dtype] += math.prod(one.shape)
    return max(numbers, key=numbers.__getitem__) if numbers else None
