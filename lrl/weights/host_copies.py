"""The bytes of tensors for the CPU. A GPU copies the next ones into pinned memory while the CPU uses
those before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 2**26
"""Of a GPU's tensor that are copied at once; two chunks are in memory."""


def host_bytes(tensors: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[int, memoryview]]:
    """Yields the bytes of tensors, each with its place: a tensor of the CPU at once, one of a GPU
    in chunks.

    Args:
        tensors: The place of the first byte, and the tensor.
    """
    ahead: Copy | None = None
    for place, tensor in tensors:
        content = tensor.contiguous().reshape(-1).view(torch.uint8)
        if content.device.type == "cpu":
            yield place, content.numpy().data
            continue
        for chunk in content.split(CHUNK_BYTES):
            before, ahead = ahead, Copy(place, chunk)
            place += len(chunk)
            if before is not None:
                yield before.wait()
    if ahead is not None:
        yield ahead.wait()


class Copy:
    """A copy on its way.

    Args:
        place: Of its first byte.
        source: Bytes on a GPU.
    """

    def __init__(self, place: int, source: Tensor) -> None:
        self._place = place
        # Torch keeps pinned memory for the next copies.
        self._content = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
        self._content.copy_(source, non_blocking=True)
        self._arrived = torch.Event(source.device)
        self._arrived.record()

    def wait(self) -> tuple[int, memoryview]:
        """Returns the bytes and their place when they are there."""
        self._arrived.synchronize()
        return self._place, self._content.numpy().data
