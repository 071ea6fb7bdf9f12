"""The parts of a version on their way to the generators: what a rank keeps in its memory and serves,
and rank 0's order to fetch it.

    GET /lrl/parts/VERSION/RANK/header    the header of the version's file, of any rank
                               /delta     the version that the differences need, once they are made
                               /N         block N
                               /dN        its difference to the block of the base

Generators that have fetched a block serve it under the same path (`lrl.vllm_plugin.fetched_files`).

A difference of two versions of a block says which of its words of 16 bits differ, and by which bits.
A small step leaves most bfloat16 weights as they are. Where few words differ, their places and
differences are far less to compress than the XOR of all words, which is mostly zeros. In float32
almost every weight changes, in its lower word. Zlib's strategy for runs (Z_RLE) at level 1 is fast
where little repeats.
"""

from __future__ import annotations

import asyncio
import http
import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from aiohttp import web

from lrl.errors import DamagedDelta
from lrl.system.auth import TokenServer
from lrl.system.endpoint import Endpoint, Location
from lrl.system.event_loop import start_daemon_call
from lrl.weights.version_file import Header

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]

ROW = 2**16
"""Words of a row: the place of a word in its row has 16 bits."""
MAX_DELTA_SHARE = 0.5
"""Largest share of a part that its delta is worth: above it, making it takes longer than a gigabit
link saves."""
BLOCKS_THAT_DECIDE = 4
"""Blocks after which a delta that is above `MAX_DELTA_SHARE` is given up."""
FETCH = "/lrl/fetch"
"""The route of a generator that takes a `FetchOrder`."""
PARTS = "/lrl/parts/"
"""The route under which the trainer's ranks and the generators serve the blocks of a version."""


@dataclass(frozen=True)
class FetchOrder:
    """One version of the weights, and the ways to it."""

    version: str
    """Unique in the run: no other content has the name."""
    checksum: int
    """Of its header."""
    ranks: list[Location]
    """The trainer's ranks, each with its part."""
    peers: list[Location]
    """All machines that fetch the version now, this one too; none for one that fetches alone."""
    number: int
    """Of this one among them."""
    deadline_s: float
    """Seconds for all of it."""
    beside: str = ""
    """Path of the version's file of another generator on this machine."""

    @staticmethod
    def from_json(found: dict[str, Any]) -> FetchOrder:
        """Returns the order that `asdict` has made a mapping of; raises TypeError or KeyError for
        anything else."""
        places = {name: [Location(**place) for place in found[name]] for name in ("ranks", "peers")}
        return FetchOrder(**found | places)


@dataclass(frozen=True)
class FetchReport:
    """The outcome of a fetch."""

    file: str
    """Path of the version's file on its machine."""
    how: Literal["held", "delta", "whole"]
    """`held`: it was there already."""
    from_trainer: int = 0
    """Bytes."""
    from_peers: int = 0
    """Bytes."""


class Delta:
    """The differences of all blocks of a part, made one after the other by threads of its own."""

    def __init__(self, blocks: int) -> None:
        self.worth: Future[bool] = Future()
        """Whether they are worth fetching, known after the first few."""
        self.blocks = [Future[bytes]() for _ in range(blocks)]
        """The difference of each block, once it is made."""

    def make(self, read: Callable[[int], tuple[bytes, bytes]], ended: Callable[[], bool]) -> None:
        """Makes them, unless they are not worth it.

        Args:
            read: Reads a block of the older version and of the newer one; equally long.
            ended: Whether nobody needs them any more; asked at each block.
        """
        threads = min(8, max(1, len(os.sched_getaffinity(0)) // 2))
        first = min(BLOCKS_THAT_DECIDE, len(self.blocks))
        whole = small = 0

        def difference(index: int) -> tuple[int, bytes]:
            before, after = (np.frombuffer(one, np.uint8) for one in read(index))
            return len(after), compressed(before, after)

        if not first:  # a rank without rows
            self.worth.set_result(True)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="lrl-delta")
        try:
            made = pool.map(difference, range(len(self.blocks)))
            for number, (block, (size, content)) in enumerate(zip(self.blocks, made, strict=True)):
                block.set_result(content)
                whole += size
                small += len(content)
                if number + 1 == first:
                    self.worth.set_result(small <= MAX_DELTA_SHARE * whole)
                if ended() or (self.worth.done() and not self.worth.result()):
                    break
        except Exception as error:  # whoever asks for one raises it
            self._fail(error)
        finally:
            pool.shutdown(cancel_futures=True)
            self._fail(ValueError("the difference was not made"))

    def _fail(self, error: Exception) -> None:
        futures: list[Future[Any]] = [self.worth, *self.blocks]
        for future in futures:
            if not future.done():
                future.set_exception(error)


def compressed(before: Bytes, after: Bytes) -> bytes:
    """Returns the compressed difference of `before` and `after`, which have the same length.

    It is one zlib stream of the number of words that differ in each row, of the steps from each
    such place to the next, and of the XOR there; the lower and upper bytes of steps and XOR apart,
    because the upper ones are mostly zero.
    """
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
    """Makes of an older block the newer one, whose difference from it is `small`, the result of
    `compressed`.

    Raises:
        DamagedDelta: It was not made for this length, or is damaged; the block is nobody's then.
    """
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
        raise DamagedDelta(f"a difference is damaged: {error}.") from error
    if len(old) % 2:  # the words are those of a copy
        old[:] = words.view(np.uint8)[:-1]


def _planes(words: Words) -> Bytes:
    """Returns the lower and the upper bytes."""
    return words.view(np.uint8).reshape(-1, 2).T


def _words(piece: Bytes) -> Words:
    return (piece if len(piece) % 2 == 0 else np.append(piece, np.uint8(0))).view("<u2")


class Part:
    """A part in a file of the memory, which the kernel frees with the process, whatever ends that.

    Args:
        header: Of the version.
        rank: Whose part it is.
        descriptor: The file: every block is at its place in the version's, and the rest is a hole.
    """

    def __init__(self, header: Header, rank: int, descriptor: int) -> None:
        self.header = header
        self.blocks = header.parts[rank]
        self.base = ""
        """The version that the differences need."""
        self.delta = Delta(len(self.blocks))
        """To the part of that version; made only if there is one."""
        self._file = os.fdopen(descriptor, "rb")

    def read(self, index: int) -> bytes:
        """Returns the bytes of a block; raises ValueError when it is closed."""
        return self.blocks[index].read(self._file.fileno())

    def compare(self, older: Part, base: str) -> None:
        """Begins to make the difference to the part of version `base`, which is closed then."""
        self.base = base

        def both(index: int) -> tuple[bytes, bytes]:
            return older.read(index), self.read(index)

        def make() -> None:
            self.delta.make(both, ended=lambda: self._file.closed)
            older.close()

        start_daemon_call(make, "lrl-delta")

    def close(self) -> None:
        """Frees it; idempotent."""
        self._file.close()


class PartServer(TokenServer):
    """Serves the parts of one rank, by the names of their versions; see `TokenServer`."""

    def __init__(self, endpoint: Endpoint, token: str, parts: dict[str, Part]) -> None:
        self._parts = parts
        super().__init__(endpoint, token, [web.get(PARTS + "{version}/{part}/{what}", self._serve)])

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        what = request.match_info["what"]
        part = self._parts.get(request.match_info["version"])
        if part is None:
            return web.json_response(
                {"error": "there is no such version any more"}, status=http.HTTPStatus.NOT_FOUND
            )
        if what == "header":
            return web.Response(body=part.header.text)
        if what == "delta":
            worth = bool(part.base) and await _result_of(part.delta.worth)
            return web.json_response({"base": part.base if worth else ""})
        if what.startswith("d"):
            return web.Response(body=await _result_of(part.delta.blocks[int(what[1:])]))
        return web.Response(body=await asyncio.to_thread(part.read, int(what)))


async def _result_of(future: Future[T]) -> T:
    return await asyncio.shield(asyncio.wrap_future(future))
