"""Fetches a generator's versions of the weights: an ASGI middleware of vLLM's API server, guarded by
the run's token.

    POST /lrl/fetch               fetches a version into this machine's shared memory
    GET  /lrl/parts/VERSION/...   serves the blocks of a version that are here to other generators

Each block of a version comes from one of two places. One machine among those that fetch, another
one for each block, takes it from the trainer's rank that holds it; all others take it from that
machine. So a rank sends each block once however many machines there are, and no link carries more
than its share. Whoever fails is passed over: then the block comes from the trainer.

The files lie in shared memory, from which the workers load them. There is one at rest, the version
that the generator holds, which the next differences need. A file gets its name when all its blocks
are right, so a damaged one is never loaded. All is in the names, because vLLM may run several API
servers side by side:

    VERSION                 a whole version
    VERSION.draft           one on its way
    VERSION.have            a byte for each of its blocks, 1 where it is there
    VERSION.N.delta         the difference of block N, for other generators
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from xxhash import xxh3_64_intdigest

from lrl.errors import BadTransfer, FetchFailed
from lrl.generators.server import FILES_VARIABLE
from lrl.system.auth import TOKEN_VARIABLE
from lrl.system.endpoint import Location
from lrl.vllm_plugin import block_client
from lrl.vllm_plugin.block_client import FAILURES, BlockClient, Content
from lrl.weights.parts import FETCH, PARTS, FetchOrder, FetchReport, restore
from lrl.weights.version_file import Block, Header, open_new, read_header, require_room

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

THREADS = 8
"""Blocks that are on their way at once."""
FROM_TRAINER = 1
"""As many of them come from the trainer, where other machines fetch too: one block after another is
soon whole, and the others can have it."""
LOOK_S = 0.02
"""Seconds between two looks for a block that another machine does not have yet."""
HOLD_S = 0.5
"""Seconds for which a request waits for a block that is on its way here."""


class PullRoutes:
    """The middleware, given to vLLM by its class path. A fetch runs on a thread besides the server's
    event loop; the generator writes meanwhile."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.files = FetchedFiles(Path(os.environ[FILES_VARIABLE]), os.environ[TOKEN_VARIABLE])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers requests of the two routes, and forwards all others."""
        call = (scope["method"], scope["path"]) if scope["type"] == "http" else ("", "")
        if call == ("POST", FETCH):
            response = await self._fetch(await Request(scope, receive).json())
        elif call[0] == "GET" and call[1].startswith(PARTS):
            response = await self._block(call[1].removeprefix(PARTS))
        else:
            return await self.app(scope, receive, send)
        await response(scope, receive, send)

    async def _fetch(self, order: dict[str, object]) -> Response:
        try:
            return JSONResponse(
                asdict(await asyncio.to_thread(self.files.fetch, FetchOrder.from_json(order)))
            )
        except (FetchFailed, OSError) as error:
            return JSONResponse({"error": str(error)}, 502)

    async def _block(self, what: str) -> Response:
        clock = asyncio.get_running_loop().time
        end = clock() + HOLD_S
        try:
            version, part, block = what.split("/")
            while (
                found := await asyncio.to_thread(self.files.block, version, part, block)
            ) is None and clock() < end:
                await asyncio.sleep(LOOK_S)
        except (FileNotFoundError, ValueError, IndexError):
            return JSONResponse({"error": f"{what} is not here"}, 404)
        return Response(status_code=409) if found is None else Response(found)


class FetchedFiles:
    """The versions of one generator.

    Args:
        folder: Where they lie, and nothing else; closed to other users.
        token: The run's token, for the sources.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder
        self._token = token
        self._one_at_a_time = threading.Lock()
        self._newest: FetchOrder | None = None
        self._served: tuple[str, Header] = ("", Header(b""))

    def block(self, version: str, part: str, what: str) -> bytes | None:
        """Returns a block for another generator, or its difference (`lrl.weights.parts`);
        None if it is not here yet.

        Raises:
            FileNotFoundError: It will not be here.
        """
        if not re.fullmatch(r"[\w-]+/\d+/d?\d+", f"{version}/{part}/{what}"):
            raise FileNotFoundError(version)
        path = self._folder / version
        draft, have = path.with_suffix(".draft"), path.with_suffix(".have")
        try:
            there = have.read_bytes() if have.exists() else b""
            file = path if path.exists() else draft
            if file is draft and not there:
                return None  # the order may be on its way
            block = self._header_of(version, file).parts[int(part)][int(what.removeprefix("d"))]
            if file is draft and there[block.number] != 1:
                return None
            if what.startswith("d"):
                return _small(path, block).read_bytes()
            with file.open("rb") as open_file:
                return block.read(open_file.fileno())
        except FileNotFoundError:
            if what.startswith("d") or not path.exists():
                raise
            return self.block(version, part, what)  # it has become whole meanwhile

    def _header_of(self, version: str, path: Path) -> Header:
        name, header = self._served
        if name != version:
            self._served = (version, header := read_header(path))
        return header

    def fetch(self, order: FetchOrder) -> FetchReport:
        """Makes the file of a version be here.

        An order that is still being carried out gives way to a new one.

        Raises:
            FetchFailed: It did not arrive, or not in time.
            OSError: There is no room for it.
        """
        self._newest = order
        with self._one_at_a_time:
            path = self._folder / order.version
            for held in (str(path), order.beside):
                if os.access(held, os.R_OK) and read_header(held).checksum == order.checksum:
                    return FetchReport(held, "held")
            client = BlockClient(order, self._token, lambda: self._newest is not order)
            fetch = Fetch(order, path, client)
            self._keep_only(order.version, fetch.base)
            fetch.run()
            if fetch.base:
                (self._folder / fetch.base).unlink()
            return FetchReport(
                str(path),
                "delta" if fetch.base else "whole",
                from_trainer=fetch.received["trainer"],
                from_peers=fetch.received["peers"],
            )

    def _keep_only(self, *versions: str) -> None:
        """Removes the files of all other versions."""
        for path in self._folder.iterdir():
            if path.name.partition(".")[0] not in versions:
                path.unlink(missing_ok=True)


class Fetch:
    """One version on its way, over all attempts: blocks that are there already stay.

    Args:
        order: What to fetch.
        path: The file to make.
        sources: Asks for the blocks.

    Raises:
        FetchFailed: The trainer does not say what the version is.
    """

    def __init__(self, order: FetchOrder, path: Path, sources: BlockClient) -> None:
        self.path = path
        self.received = Counter[str]()
        """Bytes from `trainer` and `peers`."""
        self._order = order
        self._sources = sources
        self._lock = threading.Lock()
        self._lost = set[int]()  # machines that are not asked any more
        self._heard_at = [time.monotonic()] * len(order.peers)
        self.header = Header(bytes(sources.of_rank(0, lambda at: sources.get(at, "0/header"))))
        if self.header.checksum != order.checksum:
            raise FetchFailed(f"{order.version} has another header than the trainer has staged.")
        self._bases = [self._base_of(rank) for rank in range(len(order.ranks))]

    @property
    def base(self) -> str:
        """The version that is here and whose differences are fetched; empty without."""
        return max(self._bases)

    def _base_of(self, rank: int) -> str:
        sources = self._sources
        # They may still be in the making.
        found = sources.of_rank(rank, lambda at: sources.get(at, f"{rank}/delta", waits=True))
        base: str = json.loads(found)["base"]
        return base if base and (self.path.parent / base).exists() else ""

    def run(self) -> None:
        """Fetches all blocks that are not there.

        Raises:
            FetchFailed: One did not come.
            OSError: There is no room.
        """
        draft, have = self.path.with_suffix(".draft"), self.path.with_suffix(".have")
        blocks = [block for part in self.header.parts for block in part]
        if not have.exists():
            require_room(self.path.parent, self.header.size)
            draft.unlink(missing_ok=True)
            with open_new(draft) as new:
                new.write(self.header.text)
                new.truncate(self.header.size)
            with open_new(have) as marks:
                marks.write(bytes(len(blocks)))
        there = have.read_bytes()
        missing = [block for block in blocks if not there[block.number]]
        base = self.path.parent / self.base if self.base else draft
        with draft.open("r+b") as file, have.open("r+b") as marks, base.open("rb") as older:
            self._fill(missing, file.fileno(), marks.fileno(), older.fileno())
        draft.rename(self.path)
        have.unlink()

    def _fill(self, missing: list[Block], file: int, marks: int, older: int) -> None:
        machines, number = max(1, len(self._order.peers)), self._order.number
        own = deque(block for block in missing if block.number % machines == number)

        def turn(block: Block) -> tuple[int, int]:
            # As the others get them, and of those at once the next machine's first: no two machines
            # begin at one.
            return block.number // machines, (block.number - number) % machines

        theirs = (block for block in missing if block.number % machines != number)
        others = deque(sorted(theirs, key=turn))

        def work(queues: list[deque[Block]]) -> None:
            while queue := next(filter(None, queues), None):
                with suppress(IndexError):  # another thread took the last one
                    block = queue.popleft()
                    self._sources.raise_if_over()
                    if (content := self._fetched(block, older)) is None:
                        queue.append(block)
                        time.sleep(LOOK_S)
                        continue
                    block.write(file, content)
                    os.pwrite(marks, b"\1", block.number)

        with ThreadPoolExecutor(THREADS) as pool:
            first = FROM_TRAINER if others else THREADS
            queues = [[own, others]] * first + [[others]] * (THREADS - first)
            try:
                for one in [pool.submit(work, each) for each in queues]:
                    one.result()
            finally:
                own.clear()
                others.clear()

    def _fetched(self, block: Block, older: int) -> Content | None:
        """Returns a block; None if the machine that takes it from the trainer has it not yet."""
        peers, number = self._order.peers, self._order.number
        owner = block.number % max(1, len(peers))
        if owner == number or owner in self._lost:
            return self._sources.of_rank(block.part, lambda at: self._checked(at, block, older))
        try:
            content = self._checked(peers[owner], block, older)
        except FAILURES as error:
            self._pass_over(owner, error)
            return None
        if content is not None:
            self._heard_at[owner] = time.monotonic()
        elif time.monotonic() - self._heard_at[owner] > block_client.STALL_S:
            self._pass_over(owner, "it has nothing new")
        return content

    def _pass_over(self, owner: int, why: object) -> None:
        log.warning("%s is passed over: %s", self._order.peers[owner].url, why)
        self._lost.add(owner)

    def _checked(self, at: Location, block: Block, older: int) -> Content | None:
        """Returns a block from a rank or another machine, None if that has it not yet; raises
        BadTransfer for a damaged one."""
        small = bool(self._bases[block.part])
        content = self._sources.get(at, f"{block.part}/{'d' * small}{block.index}")
        if content is None:
            return None
        with self._lock:
            self.received["trainer" if at in self._order.ranks else "peers"] += len(content)
        whole: Content = content
        if small:
            restore(whole := bytearray(block.read(older)), content)
        if xxh3_64_intdigest(whole) != block.sum:
            self._bases[block.part] = ""  # the version before may be what is damaged
            raise BadTransfer(f"block {block.index} of rank {block.part}'s part is damaged")
        if small:
            draft = self.path.with_suffix(f".{block.number}.small")
            draft.write_bytes(content)
            draft.rename(_small(self.path, block))
        return whole


def _small(path: Path, block: Block) -> Path:
    """Returns where the difference of a block lies, for other generators."""
    return path.with_suffix(f".{block.number}.delta")
