"""A rank's part of a version, kept in its memory and served to the generators.

    GET /lrl/parts/VERSION/RANK/header    the header of the version's file, of any rank
                               /delta     the version that the differences need, once they are made
                               /N         block N
                               /dN        its difference to the block of the base

Generators that have fetched a block serve it under the same path (`lrl.vllm_plugin.pull_routes`).
"""

import asyncio
import http
import os
from concurrent.futures import Future
from functools import partial

from aiohttp import web

from lrl.system.endpoint import Endpoint
from lrl.system.event_loop import start_daemon_call
from lrl.system.token_server import TokenServer
from lrl.weights.delta import delta_of
from lrl.weights.fetch_order import PARTS
from lrl.weights.version_file import Block, Header


class Part:
    """A part in a file of the memory, which the kernel frees with the process, whatever ends that.

    Args:
        header: Of the version.
        rank: Whose part it is.
        descriptor: The file: the blocks, one after the other.
    """

    def __init__(self, header: Header, rank: int, descriptor: int) -> None:
        self.header = header
        self.base = ""
        """The version that the differences need."""
        self.delta: Future[list[bytes] | None] = Future()
        """The difference of each block; None without."""
        self._rank = rank
        self._file = os.fdopen(descriptor, "rb")
        self._size = self.blocks[0].nbytes if self.blocks else 0

    @property
    def blocks(self) -> list[Block]:
        """Its blocks."""
        return self.header.parts[self._rank]

    def read(self, index: int) -> bytes:
        """Returns the bytes of a block; raises ValueError when it is closed."""
        return os.pread(self._file.fileno(), self.blocks[index].nbytes, index * self._size)

    def compare(self, older: "Part | None", base: str = "") -> None:
        """Begins to make the difference to the part of version `base`, which is closed then."""
        if older is None:
            self.delta.set_result(None)
            return
        self.base = base

        def both(index: int) -> tuple[bytes, bytes]:
            return older.read(index), self.read(index)

        def make() -> None:
            reads = [partial(both, index) for index in range(len(self.blocks))]
            try:
                self.delta.set_result(delta_of(reads, lambda: self._file.closed))
            except Exception as error:  # whoever asks for it raises it
                self.delta.set_exception(error)
            finally:
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
        if what == "delta" or what.startswith("d"):
            delta = await asyncio.shield(asyncio.wrap_future(part.delta))
            if what == "delta":
                return web.json_response({"base": "" if delta is None else part.base})
            assert delta is not None, "nobody asks for the blocks of none"
            return web.Response(body=delta[int(what[1:])])
        return web.Response(body=await asyncio.to_thread(part.read, int(what)))
