"""The parts of a version on their way to the generators: what a rank keeps in its memory and serves,
and rank 0's order to fetch it.

    GET /lrl/parts/VERSION/RANK/header    the header of the version's file, of any rank
                               /delta     the version that the differences need, once they are made
                               /N         block N
                               /dN        its difference to the block of the base

Generators that have fetched a block serve it under the same path (`lrl.vllm_plugin.fetched_files`).
"""

import asyncio
import http
import os
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from aiohttp import web

from lrl.system.auth import TokenServer
from lrl.system.endpoint import Endpoint, Location
from lrl.system.event_loop import start_daemon_call
from lrl.weights.delta import Delta
from lrl.weights.version_file import Header

T = TypeVar("T")
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
    def from_json(found: dict[str, Any]) -> "FetchOrder":
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

    def compare(self, older: "Part", base: str) -> None:
        """Begins to make the difference to the part of version `base`, which is closed then."""
        self.base = base

        def both(index: int) -> tuple[bytes, bytes]:
            return older.read(index), self.read(index)

        def make() -> None:
            reads = [partial(both, index) for index in range(len(self.blocks))]
            self.delta.make(reads, ended=lambda: self._file.closed)
            older.close()

        start_daemon_call(make, "lrl-delta")

    def close(self) -> None:
        """Frees it; idempotent."""
        self._file.close()


class PartServer(TokenServer):
    """Serves the parts of one rank; see `TokenServer`.

    Args:
        endpoint: Where it listens.
        token: The run's.
        parts: By the names of their versions.
    """

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
