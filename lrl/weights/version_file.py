"""The file of a version: safetensors, whose header also has the trainer ranks' parts and a checksum
of each block.

Where adapters are trained (LoRA), a version is two small matrices for each W, which a generator
merges. A part, what one rank holds, is ranges of the file; it is written, fetched and checked in
blocks, without the rest of the file. All versions of a run have headers of one length: every byte
stays at its place.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
from torch import Tensor
from xxhash import xxh3_64, xxh3_64_hexdigest

from lrl.system.machine import in_gib
from lrl.training.merging import DOWN, UP, merge

if TYPE_CHECKING:
    from lrl.training.pieces import Piece

FORMATS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""In a safetensors header."""
LARGEST_BLOCK = 2**24
SMALLEST_BLOCK = 2**12
BLOCKS_OF_A_PART = 64
"""At least, unless they are smaller than `SMALLEST_BLOCK`: generators exchange them while they
fetch the rest."""
SUM_DIGITS = 16

Pieces = Callable[[], Iterator["Piece"]]
"""The rows of the weights that this rank sends, afresh at every call."""


class TensorSpec(NamedTuple):
    """A tensor on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, which is a number of the first dimension; a scalar is one."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def spec_of(piece: Piece, narrow: torch.dtype | None) -> TensorSpec:
    """Returns how a tensor travels: a matrix in the generators' number format, `narrow`, if that is
    smaller, since a generator would round it anyway. Vectors and integers keep the policy's: they
    are few bytes, and vLLM computes with some of them in float32."""
    dtype, is_matrix = piece.rows.dtype, len(piece.shape) > 1
    if narrow is not None and is_matrix and dtype.is_floating_point:
        dtype = min(dtype, narrow, key=lambda one: one.itemsize)
    return TensorSpec(piece.name, dtype, piece.shape)


class Held(NamedTuple):
    """The rows of a tensor that a rank sends."""

    tensor: TensorSpec
    first: int
    rows: int


def held_rows(pieces: Iterable[Piece], narrow: torch.dtype | None) -> list[Held]:
    return [Held(spec_of(one, narrow), one.start, len(one.rows)) for one in pieces]


@dataclass(frozen=True)
class Block:
    number: int
    """Among all blocks of the version."""
    part: int
    index: int
    """Among the blocks of its part."""
    sum: int
    """Its checksum, XXH3 of 64 bits; 0 before the version is written."""
    ranges: list[tuple[int, int]]
    """Its bytes in the file."""

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def read(self, descriptor: int) -> bytes:
        found = [os.pread(descriptor, end - start, start) for start, end in self.ranges]
        return found[0] if len(found) == 1 else b"".join(found)

    def write(self, descriptor: int, content: bytes | bytearray | memoryview) -> None:
        view, done = memoryview(content), 0
        for start, end in self.ranges:
            os.pwrite(descriptor, view[done : done + end - start], start)
            done += end - start


@dataclass(frozen=True)
class Header:
    text: bytes
    """The beginning of a version's file: the length of a table, and the table."""

    @cached_property
    def _table(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text[8:])
        return found

    @cached_property
    def checksum(self) -> str:
        """Of the whole version, and its name: the table has the checksums of all blocks."""
        return xxh3_64_hexdigest(self.text)

    @cached_property
    def places(self) -> dict[str, int]:
        return {
            name: len(self.text) + one["data_offsets"][0]
            for name, one in self._table.items()
            if name != "__metadata__"
        }

    @property
    def size(self) -> int:
        tensors = (one for name, one in self._table.items() if name != "__metadata__")
        return len(self.text) + max((one["data_offsets"][1] for one in tensors), default=0)

    @cached_property
    def parts(self) -> list[list[Block]]:
        """The blocks of each rank's part."""
        metadata = self._table["__metadata__"]
        layout, numbers = json.loads(metadata["layout"]), count()
        found: list[list[Block]] = []
        for part, ranges in enumerate(layout["parts"]):
            found.append([])
            room = 0
            for start, end in ranges:
                place, end = start + len(self.text), end + len(self.text)
                while place < end:
                    if not room:
                        number = next(numbers)
                        at = SUM_DIGITS * number
                        digits = metadata["sums"][at : at + SUM_DIGITS]
                        index, checksum = len(found[-1]), int(digits, 16)
                        found[-1].append(Block(number, part, index, sum=checksum, ranges=[]))
                        room = layout["block"]
                    taken = min(room, end - place)
                    found[-1][-1].ranges.append((place, place + taken))
                    place += taken
                    room -= taken
        return found

    def with_sums(self, sums: Sequence[Sequence[int]]) -> Header:
        text = "".join(f"{one:0{SUM_DIGITS}x}" for part in sums for one in part)
        table = self._table
        return Header(_encoded({**table, "__metadata__": {**table["__metadata__"], "sums": text}}))

    @staticmethod
    def of(pool: str, parts: Sequence[Sequence[Held]]) -> Header:
        """Returns the header of a version whose blocks are not known yet, from what each rank
        sends. Each pool has headers of its own, since its differences are from another version."""
        table, size = dict[str, Any](), 0
        # The widest first: each is at a place that its number format divides, and a view will do.
        # In rank 0's order: transformers sorts the weights of a model that it has opened from its
        # files, and not those of one that has got them from rank 0.
        tensors = [held.tensor for held in parts[0]]
        for one in sorted(tensors, key=lambda one: -one.dtype.itemsize):
            place = {"shape": one.shape, "data_offsets": (size, size + one.nbytes)}
            table[one.name] = {"dtype": FORMATS[one.dtype]} | place
            size += one.nbytes
        ranges = []
        for rows in parts:
            starts = (
                (table[one.name]["data_offsets"][0] + first * one.row_bytes, count * one.row_bytes)
                for one, first, count in rows
            )
            ranges.append(joined((start, start + nbytes) for start, nbytes in starts if nbytes))
        sizes = [sum(end - start for start, end in of_one) for of_one in ranges]
        block = -(-max(sizes, default=0) // BLOCKS_OF_A_PART)
        block = max(SMALLEST_BLOCK, min(LARGEST_BLOCK, block))
        layout = json.dumps({"block": block, "parts": ranges})
        blocks = sum(-(-size // block) for size in sizes)
        sums = "0" * SUM_DIGITS * blocks
        table["__metadata__"] = {"pool": pool, "layout": layout, "sums": sums}
        return Header(_encoded(table))


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def _encoded(table: dict[str, Any]) -> bytes:
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors after it are aligned
    return len(text).to_bytes(8, "little") + text


def read_header(path: str) -> Header:
    with open(path, "rb") as file:
        length = file.read(8)
        size = int.from_bytes(length, "little")
        return Header(length + file.read(min(size, os.path.getsize(path))))


def check_file(path: str, checksum: str) -> None:
    """Raises ValueError unless a file is the whole version whose header has this checksum."""
    header = read_header(path)
    if header.checksum != checksum:
        raise ValueError(f"{path} has the checksum {header.checksum}, and {checksum} was sent.")

    if (size := os.path.getsize(path)) != header.size:
        raise ValueError(f"{path} has {size} bytes, and {header.size} were sent.")
    blocks = [block for part in header.parts for block in part]
    with open(path, "rb") as file:
        sums = sums_of(blocks, file.fileno())
    for block, found in zip(blocks, sums, strict=True):
        if found != block.sum:
            raise ValueError(f"{path} is damaged: block {block.index} of rank {block.part}'s part.")


def sums_of(blocks: Sequence[Block], descriptor: int) -> list[int]:
    """Returns the checksum of each block as the file has it."""
    if not blocks:
        return []  # an empty file cannot be mapped

    def sum_of(block: Block) -> int:
        found = xxh3_64()
        for start, end in block.ranges:
            found.update(view[start:end])
        return found.intdigest()

    with (
        mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
        ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool,
    ):
        return list(pool.map(sum_of, blocks))


def merged(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields W + B A for each W of `base` that has adapters, and every other weight as it is.

    vLLM's own adapters would not do: vLLM keeps the old one in every response that it is writing
    (seen with vLLM 0.32), so that tokens would carry a version that did not write them.

    Args:
        base: The first version, by the names in a checkpoint.
        adapters: The trainer's matrices, by W and the end of their name on the wire.
        dtype: In which the generator computes, whatever that of the files.
    """
    left = set(adapters)
    for name, weight in base:
        if name + UP in left:
            left -= {name + DOWN, name + UP}
            down, up = adapters[name + DOWN], adapters[name + UP]
            weight = merge(name, weight, down=down, up=up, dtype=dtype)
        yield name, weight
    if left:
        raise ValueError(f"There is no weight for the trainer's adapter {min(left)}.")


def require_memory(nbytes: int) -> None:
    """Raises OSError if weights of this size do not fit into the free memory."""
    free = psutil.virtual_memory().available
    if nbytes > free:
        takes, has = in_gib(nbytes, free)
        raise OSError(f"the weights take {takes} GiB of memory, and {has} GiB are free.")


def path_of(descriptor: int) -> str:
    """Returns the path by which this user's other processes on this machine open a file that this
    process has open: one in memory has no name, and the kernel frees it with its last process."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
