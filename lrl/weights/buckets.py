"""The weights in buckets of a few whole tensors. Each trainer rank packs the rows that it sends of
them, and a checksum behind; a worker puts the tensors together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lrl.weights.version_file import Held, TensorSpec

WORD_BYTES = 8
CHUNK_WORDS = 2**20
"""Words of which a checksum is made at once, so that it needs little memory."""
ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd numbers of 64 bits, whose multiples lose no bit (those of splitmix64 and xxhash)."""


@dataclass(frozen=True)
class Bucket:
    tensors: Sequence[TensorSpec]
    rows: Sequence[Sequence[tuple[int, int]]]
    """By rank, of each tensor: the first row, and how many."""

    def words(self, rank: int) -> int:
        """Returns how many words a rank sends: its rows, and a checksum."""
        pairs = zip(self.tensors, self.rows[rank], strict=True)
        nbytes = sum(tensor.row_bytes * count for tensor, (_, count) in pairs)
        return -(-nbytes // WORD_BYTES) + 1

    def pack(self, rows: Iterable[Tensor], packed: Tensor) -> None:
        """Packs what a rank sends, int64 [words], from its rows of each tensor."""
        packed[-2:] = 0  # the last word of the rows may not be full
        place, content = 0, _bytes(packed)
        for tensor, own in zip(self.tensors, rows, strict=True):
            sent = _bytes(own.detach().to(packed.device, tensor.dtype))
            content[place : place + len(sent)].copy_(sent)
            place += len(sent)
        packed[-1] = checksum(packed[:-1])

    def unpack(self, packed: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors, of what each rank has sent."""
        places = [0] * len(packed)
        for number, spec in enumerate(self.tensors):
            tensor = torch.empty(spec.shape, dtype=spec.dtype, device=packed[0].device)
            content = _bytes(tensor)
            for rank, sent in enumerate(packed):
                first, count = self.rows[rank][number]
                start, nbytes = first * spec.row_bytes, count * spec.row_bytes
                part = _bytes(sent)[places[rank] : places[rank] + nbytes]
                content[start : start + nbytes].copy_(part)
                places[rank] += nbytes
            yield spec.name, tensor


@dataclass(frozen=True)
class JoinOrder:
    """Rank 0's order to join a communicator."""

    unique_id: bytes
    size: int
    """Members: the ranks, then the workers of all generators."""
    narrow: torch.dtype
    """The generators' number format (`lrl.weights.version_file.spec_of`)."""


Plan = dict[str, Any]
"""The division of all weights into buckets, as JSON."""


def plan_of(parts: Sequence[Sequence[Held]], bucket_bytes: int) -> Plan:
    """Returns the plan for what each rank sends; buckets have `bucket_bytes` before the tensor that
    fills them."""
    tensors = [held.tensor for held in parts[0]]
    if any([held.tensor for held in part] != tensors for part in parts):
        raise RuntimeError("The ranks have the policy's weights in different orders.")
    rows = [[(held.first, held.rows) for held in part] for part in parts]
    told = [(one.name, str(one.dtype).removeprefix("torch."), one.shape) for one in tensors]
    return {"tensors": told, "rows": rows, "bucket_bytes": bucket_bytes}


def buckets_of(plan: Plan) -> list[Bucket]:
    tensors = [
        TensorSpec(name, getattr(torch, dtype), tuple(shape))
        for name, dtype, shape in plan["tensors"]
    ]
    found, first, size = list[Bucket](), 0, 0
    for end, tensor in enumerate(tensors, start=1):
        size += tensor.nbytes
        if size >= plan["bucket_bytes"] or end == len(tensors):
            rows = [of_rank[first:end] for of_rank in plan["rows"]]
            found.append(Bucket(tensors[first:end], rows))
            first, size = end, 0
    return found


def exchange(
    group: Any, bucket: Bucket, rank: int, own: Tensor | None, device: Any
) -> list[Tensor]:
    """Broadcasts a bucket; returns what each trainer rank has sent, when the stream has come so
    far.

    Args:
        group: vLLM's `PyNcclCommunicator`, in which the trainer's ranks are the first.
        bucket, device: What arrives, and where.
        rank: Of this process in the group.
        own: What a trainer rank sends (`Bucket.pack`); None in a worker.
    """
    packed = [
        own
        if own is not None and root == rank
        else torch.empty(bucket.words(root), dtype=torch.int64, device=device)
        for root in range(len(bucket.rows))
    ]
    stream = torch.cuda.current_stream(device) if packed[0].is_cuda else None
    group.group_start()
    for root, sent in enumerate(packed):
        group.broadcast(sent, src=root, stream=stream)
    group.group_end()
    return packed


def damaged(packed: Iterable[Tensor]) -> Tensor:
    """Whether anything of what ranks have sent has another checksum: bool []."""
    return torch.stack([checksum(sent[:-1]) != sent[-1] for sent in packed]).any()


def raise_if_damaged(found: Tensor) -> None:
    """Waits for the device."""
    if found.any():
        raise ValueError("weights have arrived damaged: a checksum does not fit")


def this_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def checksum(words: Tensor) -> Tensor:
    """Returns a checksum of words and their places, int64 []; the same on every device, since
    integers add up alike in any order."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        places = torch.arange(start + 1, start + 1 + len(chunk), device=words.device)
        mixed = (chunk ^ (places * ODD[0])) * ODD[1]
        mixed ^= mixed >> 29
        total += (mixed * ODD[2]).sum()
    return total


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
