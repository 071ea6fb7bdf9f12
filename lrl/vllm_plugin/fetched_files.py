"""Fetches a generator's versions of the weights: an ASGI middleware of vLLM's API server, guarded
by the run's token.

    POST /lrl/fetch               fetches a version into a file in this machine's memory
    GET  /lrl/parts/CHECKSUM/...  serves the blocks of a version that are here to other generators

Of the machines that fetch, one takes a block from the trainer's rank that holds it, another one for
each block, and all others take it from that machine. So a rank sends each block once however many
machines there are, and no link carries more than its share. Whoever fails is passed over: then the
block comes from the trainer.

One file stays, the generator's version, which the next differences need (and the beginning of the
next one after a failed fetch). The trainer learns a file's path when all its blocks are right, so a
damaged one is never loaded.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from xxhash import xxh3_64_intdigest

from lrl.errors import BadTransfer, FetchFailed
from lrl.system.auth import TOKEN_VARIABLE, bearer
from lrl.system.endpoint import Location, connect
from lrl.system.machine import memory_file
from lrl.weights.parts import FETCH, PARTS, FetchOrder, FetchReport, restore
from lrl.weights.version_file import Block, Header, path_of, read_header, require_memory

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

T = TypeVar("T")
Content = bytes | bytearray

THREADS = 8
"""Blocks that are on their way at once."""
FROM_TRAINER = 1
"""Of them, where other machines fetch too: one block after another is soon whole for the others."""
LOOK_S = 0.02
"""Seconds between two looks for a block that another machine does not have yet."""
HOLD_S = 0.5
"""Seconds for which a request waits for a block that is on its way here."""
ATTEMPTS = 5
"""At one answer of the trainer."""
BACKOFF_S = 0.5
"""Seconds before a second attempt; each further one waits so much longer."""
STALL_S = 10.0
"""Seconds without a byte that end an attempt, and without a block that a machine is waited for."""
IDLE_S = 2.0
"""Seconds after which a connection is not used again: vLLM's server closes it after five."""
FAILURES = (OSError, http.client.HTTPException, BadTransfer)
"""Of one attempt."""


class PullRoutes:
    """The middleware, given to vLLM by its class path. The generator writes while a thread
    fetches."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.files = FetchedFiles(os.environ[TOKEN_VARIABLE])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = (scope["method"], scope["path"]) if scope["type"] == "http" else ("", "")
        if call == ("POST", FETCH):
            response = await self._fetch(await Request(scope, receive).json())
        elif call[0] == "GET" and call[1].startswith(PARTS):
            response = await self._block(call[1].removeprefix(PARTS))
        else:
            return await self.app(scope, receive, send)
        await response(scope, receive, send)

    async def _fetch(self, body: dict[str, object]) -> Response:
        try:
            report = await asyncio.to_thread(self.files.fetch, FetchOrder.from_json(body))
            return JSONResponse(asdict(report))
        except (FetchFailed, OSError) as error:
            return JSONResponse({"error": str(error)}, 502)

    async def _block(self, what: str) -> Response:
        end = time.monotonic() + HOLD_S
        try:
            checksum, part, block = what.split("/")
            while (
                found := await asyncio.to_thread(self.files.block, checksum, int(part), block)
            ) is None and time.monotonic() < end:
                await asyncio.sleep(LOOK_S)
        except (KeyError, ValueError, IndexError):
            return JSONResponse({"error": f"{what} is not here"}, 404)
        return Response(status_code=409) if found is None else Response(found)


class FetchedFiles:
    """The versions of one generator.

    Args:
        token: The run's token, for the sources.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._one_at_a_time = threading.Lock()
        self._whole: VersionFile | None = None
        self._draft: VersionFile | None = None

    def block(self, checksum: str, part: int, what: str) -> bytes | None:
        """Returns a block or its difference (`lrl.weights.parts`) for another generator; None if it
        is not here yet. KeyError, ValueError or IndexError if it will not be here."""
        for file in (self._draft, self._whole):
            if file is not None and file.header.checksum == checksum:
                block = file.header.parts[part][int(what.removeprefix("d"))]
                if block.number not in file.here:
                    return None
                return file.differences[block.number] if what[0] == "d" else file.read(block)
        return None  # the order may be on its way

    def fetch(self, order: FetchOrder) -> FetchReport:
        """Raises FetchFailed if the version did not arrive in time, and OSError without room for
        it."""
        with self._one_at_a_time:
            own = self._whole.path if self._whole is not None else ""
            for held in (own, order.beside):
                # A file: its process may have ended, and another have the number.
                if os.path.isfile(held) and read_header(held).checksum == order.checksum:
                    return FetchReport(held, "held")
            fetch = Fetch(order, self._token, self._whole)
            if self._draft is None or self._draft.header != fetch.header:
                if self._draft is not None:
                    self._draft.close()
                self._draft = None  # there may be no room for the next one
                self._draft = VersionFile(fetch.header)
            fetch.fill(self._draft)
            if self._whole is not None:
                self._whole.close()
            self._whole = self._draft
            self._draft = None
            return FetchReport(
                self._whole.path,
                fetch.how,
                from_trainer=sum(fetch.from_trainer),
                from_peers=sum(fetch.from_peers),
            )


class VersionFile:
    """A version on its way into its file, and then in it; raises OSError without room for it."""

    def __init__(self, header: Header) -> None:
        require_memory(header.size)
        self.header = header
        self.here = set[int]()
        """Numbers of the blocks that are right."""
        self.differences = dict[int, bytes]()
        """Those that came, for other generators."""
        self._file = os.fdopen(memory_file("lrl-weights"), "r+b")
        self._file.write(header.text)
        self._file.truncate(header.size)
        self._file.flush()
        self.path = path_of(self._file.fileno())

    def read(self, block: Block) -> bytes:
        return block.read(self._file.fileno())

    def put(self, block: Block, content: Content) -> None:
        block.write(self._file.fileno(), content)
        self.here.add(block.number)

    def close(self) -> None:
        self._file.close()


class Fetch:
    """One attempt at a version, by several threads. Raises FetchFailed if the trainer does not say
    what the version is.

    Args:
        order: What to fetch, and who has it.
        token: The run's.
        older: The version that is here.
    """

    def __init__(self, order: FetchOrder, token: str, older: VersionFile | None) -> None:
        self.from_trainer: list[int] = []
        """Bytes of each block."""
        self.from_peers: list[int] = []
        self._order = order
        self._older = older
        self._end = time.monotonic() + order.deadline_s
        self._authorization = {"Authorization": bearer(token)}
        self._connections = threading.local()
        self._lost = set[int]()  # machines that are not asked any more
        self._heard_at = [time.monotonic()] * len(order.peers)
        self.header = Header(self._of_rank(0, lambda at: self._get(at, "0/header")) or b"")
        if self.header.checksum != order.checksum:
            raise FetchFailed("The weights have another header than the trainer has staged.")
        self._by_differences = [self._has_base_of(rank) for rank in range(len(order.ranks))]
        self.how: Literal["delta", "whole"] = "delta" if any(self._by_differences) else "whole"

    def _has_base_of(self, rank: int) -> bool:
        base = self._of_rank(rank, lambda at: self._get(at, f"{rank}/delta"))
        return self._older is not None and base == self._older.header.checksum.encode()

    def fill(self, version: VersionFile) -> None:
        """Raises FetchFailed if a block did not come."""
        machines, number = max(1, len(self._order.peers)), self._order.number
        blocks = [block for part in self.header.parts for block in part]
        missing = [block for block in blocks if block.number not in version.here]
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
                    if not self._has_fetched(block, version):
                        queue.append(block)
                        time.sleep(LOOK_S)

        with ThreadPoolExecutor(THREADS) as pool:
            first = FROM_TRAINER if others else THREADS
            queues = [[own, others]] * first + [[others]] * (THREADS - first)
            try:
                for one in [pool.submit(work, each) for each in queues]:
                    one.result()
            finally:
                own.clear()
                others.clear()

    def _has_fetched(self, block: Block, version: VersionFile) -> bool:
        """Fetches a block; returns whether the machine that takes it from the trainer has it."""
        peers, number = self._order.peers, self._order.number
        owner = block.number % max(1, len(peers))
        if owner == number or owner in self._lost:
            return self._of_rank(block.part, lambda at: self._put(at, block, version))
        try:
            if self._put(peers[owner], block, version):
                self._heard_at[owner] = time.monotonic()
                return True
            if time.monotonic() - self._heard_at[owner] <= STALL_S:
                return False
            why: object = "it has nothing new"
        except FAILURES as error:
            why = error
        log.warning("%s is passed over: %s", peers[owner].url, why)
        self._lost.add(owner)
        return False

    def _put(self, at: Location, block: Block, version: VersionFile) -> bool:
        """Returns False if a rank or machine does not have a block yet. Raises BadTransfer for a
        damaged one."""
        small = self._by_differences[block.part]
        content = self._get(at, f"{block.part}/{'d' * small}{block.index}")
        if content is None:
            return False
        (self.from_trainer if at in self._order.ranks else self.from_peers).append(len(content))
        whole: Content = content
        if small:
            assert self._older is not None, "it is the base"
            restore(whole := bytearray(self._older.read(block)), content)
        if xxh3_64_intdigest(whole) != block.sum:
            self._by_differences[block.part] = False  # the version before may be what is damaged
            raise BadTransfer(f"block {block.index} of rank {block.part}'s part is damaged")
        if small:
            version.differences[block.number] = content
        version.put(block, whole)
        return True

    def _of_rank(self, rank: int, ask: Callable[[Location], T]) -> T:
        """Raises FetchFailed after several attempts at a rank or at the deadline."""
        at, failures = self._order.ranks[rank], list[str]()
        while len(failures) < ATTEMPTS and time.monotonic() < self._end:
            try:
                return ask(at)
            except FAILURES as error:
                failures.append(str(error) or type(error).__name__)
                time.sleep(BACKOFF_S * len(failures))
        if time.monotonic() >= self._end:
            failures.append(f"the deadline of {self._order.deadline_s:.0f} s has passed")
        raise FetchFailed(
            f"The weights could not be fetched from rank {rank} at {at.url}: {'; '.join(failures)}"
        )

    def _get(self, at: Location, what: str) -> bytes | None:
        """Returns what is there; None if it has to be fetched there first. Raises `FAILURES`."""
        kept: dict[str, tuple[http.client.HTTPConnection, float]] = vars(self._connections)
        connection, used_at = kept.pop(at.url, (None, 0.0))
        if connection is None or time.monotonic() - used_at > IDLE_S:
            connection = connect(at, STALL_S)
        try:
            path = f"{PARTS}{self._order.checksum}/{what}"
            connection.request("GET", path, headers=self._authorization)
            answer = connection.getresponse()
            body = answer.read()
        except BaseException:
            connection.close()
            raise
        kept[at.url] = connection, time.monotonic()
        if answer.status == http.client.CONFLICT:
            return None
        if answer.status != http.client.OK:
            raise BadTransfer(f"it answered {answer.status}: {body[:200].decode(errors='replace')}")
        return body
