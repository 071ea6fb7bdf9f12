"""The parts of a version on their way to the generators: what a rank keeps in its memory and
serves, and rank 0's order to fetch it.

    GET /lrl/parts/CHECKSUM/RANK/header    the header of the version with that checksum, of any rank
                                /delta     the version that the differences need; empty without
                                /N         block N
                                /dN        its difference to the block of the base

Generators that have fetched a block serve it under the same path (`lrl.vllm_plugin.fetched_files`).

A difference says which 16-bit words of a block differ, and by which bits. A small step leaves most
bfloat16 weights as they are, and the places and bits of the rest are far less to compress than the
XOR of all words, which is mostly zeros. In float32 almost every weight changes, in its lower word.
Zlib's strategy for runs (Z_RLE) at level 1 is fast where little repeats.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from aiohttp import web

from lrl.errors import BadTransfer
from lrl.system.auth import TokenServer
from lrl.system.endpoint import Endpoint, Location
from lrl.weights.version_file import Header

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

ROW = 2**16
"""Words of a row: the place of a word in its row has 16 bits."""
MAX_DELTA_SHARE = 0.5
"""Above it, making a delta takes longer than a gigabit link saves."""
BLOCKS_THAT_DECIDE = 4
"""Blocks by which a delta is given up."""
FETCH = "/lrl/fetch"
"""Takes a `FetchOrder`, in a generator."""
PARTS = "/lrl/parts/"


@dataclass(frozen=True)
class FetchOrder:
    """One version of the weights, and the ways to it."""

    checksum: str
    """Of its header: no other content has it."""
    ranks: list[Location]
    """The trainer's, each with its part."""
    peers: list[Location]
    """All machines that fetch the version now, this one too; none for one that fetches alone."""
    number: int
    """Of this one among them."""
    deadline_s: float
    beside: str = ""
    """Path of the version's file of another generator on this machine."""

    @staticmethod
    def from_json(found: dict[str, Any]) -> FetchOrder:
        """Raises TypeError or KeyError for what is not made by `asdict`."""
        places = {name: [Location(**place) for place in found[name]] for name in ("ranks", "peers")}
        return FetchOrder(**found | places)


@dataclass(frozen=True)
class FetchReport:
    file: str
    """Path of the version's file on its machine."""
    how: Literal["held", "delta", "whole"]
    """`held`: it was there already."""
    from_trainer: int = 0
    """Bytes, as `from_peers`."""
    from_peers: int = 0


def compressed(before: Bytes, after: Bytes) -> bytes:
    """Returns the compressed difference of two blocks of one length: one zlib stream of the number
    of words that differ in each row, of the steps from each such place to the next, and of the XOR
    there; the lower and upper bytes of steps and XOR apart, because the upper ones are mostly
    zero."""
    old, new = _words(before), _words(after)
    places = np.flatnonzero(old != new)
    counts = np.diff(
        np.searchsorted(places, np.arange(0, len(old), ROW)), append=len(places)
    ).astype("<u4")
    steps = np.diff(places.astype("<u2"), prepend=np.uint16(0))  # within the row: modulo 2**16
    planes = [*_planes(steps), *_planes(old[places] ^ new[places])]
    stream = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return b"".join(
        [*(stream.compress(part.tobytes()) for part in (counts, *planes)), stream.flush()]
    )


def restore(before: bytearray, small: bytes) -> None:
    """Makes the newer block of an older one and their difference. Raises BadTransfer if that was
    not made for this length or is damaged; the block is nobody's then."""
    old = np.frombuffer(before, np.uint8)
    words = _words(old)
    try:
        data = np.frombuffer(zlib.decompress(small), np.uint8)
        rows = np.arange(0, len(words), ROW)
        counts = data[: 4 * len(rows)].view("<u4")
        planes = data[4 * len(rows) :].reshape(4, -1)
        if counts.sum() != planes.shape[1]:
            raise ValueError(f"it names {planes.shape[1]} words, and counts {counts.sum()}")
        steps, bits = (low | high.astype("<u2") << 8 for low, high in (planes[:2], planes[2:]))
        words[np.repeat(rows, counts) + np.cumsum(steps, dtype="<u2")] ^= bits
    except (zlib.error, ValueError, IndexError) as error:
        raise BadTransfer(f"a difference is damaged: {error}.") from error
    if len(old) % 2:  # the words are those of a copy
        old[:] = words.view(np.uint8)[:-1]


def _planes(words: Words) -> Bytes:
    return words.view(np.uint8).reshape(-1, 2).T


def _words(piece: Bytes) -> Words:
    return (piece if len(piece) % 2 == 0 else np.append(piece, np.uint8(0))).view("<u2")


class Part:
    """A part in a file of the memory, which the kernel frees with the process, whatever ends that.

    Args:
        header, rank: Of the version, and whose part it is.
        descriptor: The file: every block is at its place in the version's, and the rest is a hole.
        older: The part of the version before, freed when all differences are made.
    """

    def __init__(
        self, header: Header, rank: int, descriptor: int, older: Part | None = None
    ) -> None:
        self.header = header
        self.blocks = header.parts[rank]
        self._base = ""
        self._differences: list[Future[bytes]] = []
        self._file = os.fdopen(descriptor, "rb")
        if older is not None:
            self._base = older.header.checksum
            older.end_differences()
            self._differ(older)

    def _differ(self, older: Part) -> None:
        """Begins to make the differences of all blocks, in their order."""
        threads = min(8, max(1, len(os.sched_getaffinity(0)) // 2))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="lrl-delta")

        def made(index: int) -> bytes:
            before, after = (np.frombuffer(part.read(index), np.uint8) for part in (older, self))
            return compressed(before, after)

        def free(differences: list[Future[bytes]]) -> None:
            wait(differences)
            older.close()

        self._differences = [pool.submit(made, index) for index in range(len(self.blocks))]
        pool.submit(free, self._differences)
        pool.shutdown(wait=False)

    def read(self, index: int) -> bytes:
        """Raises ValueError when it is closed."""
        return self.blocks[index].read(self._file.fileno())

    @cached_property
    def base(self) -> str:
        """The checksum of the version whose differences are worth fetching; empty if none are."""
        tried = self._differences[:BLOCKS_THAT_DECIDE]
        small = sum(len(one.result()) for one in tried)
        if small <= MAX_DELTA_SHARE * sum(block.nbytes for block in self.blocks[: len(tried)]):
            return self._base
        self.end_differences()
        return ""

    def difference(self, index: int) -> bytes:
        """Waits until it is made; raises IndexError if it is not made any more."""
        return self._differences[index].result()

    def end_differences(self) -> None:
        """Frees the differences, and makes no more."""
        differences, self._differences = self._differences, []
        for one in differences:
            one.cancel()

    def close(self) -> None:
        self.end_differences()
        self._file.close()


class PartServer(TokenServer):
    """Serves the parts of one rank, one for each pool."""

    def __init__(self, endpoint: Endpoint, token: str, parts: dict[str, Part]) -> None:
        self._parts = parts
        route = web.get(PARTS + "{checksum}/{part}/{what}", self._serve)
        super().__init__(endpoint, token, [route])

    async def _serve(self, request: web.Request) -> web.Response:
        asked = request.match_info
        for part in list(self._parts.values()):
            if part.header.checksum == asked["checksum"]:
                return web.Response(body=await asyncio.to_thread(content_of, part, asked["what"]))
        return web.json_response({"error": "there is no such version any more"}, status=404)


def content_of(part: Part, what: str) -> bytes:
    if what == "header":
        return part.header.text
    if what == "delta":
        return part.base.encode()
    if what.startswith("d"):
        return part.difference(int(what[1:]))
    return part.read(int(what))
