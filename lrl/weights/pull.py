"""Weights that the generators fetch: for other machines without a common GPU network, over any
distance.

    trainer: stage a file, and its difference to the one before -> order -> generators fetch while they write
             -> pause -> each loads the file from its own shared memory

No generator waits for another's link or death, the pause is that of shared memory, and a transfer
that breaks is resumed. A generator that holds the version before fetches the difference; any other
one the whole. Those that have the version serve it to others (`lrl.weights.upload_slots`). The
other end is `lrl.vllm_plugin.pull_routes`.
"""

import asyncio
import http
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from aiohttp import web

from lrl.generators.generator import Generator
from lrl.system.endpoint import Endpoint, Location, is_loopback, own_address_towards
from lrl.system.token_server import TokenServer
from lrl.weights.delta import MAX_DELTA_SHARE, write_delta
from lrl.weights.fetch_order import FETCH, FILES, FetchOrder, FetchReport, RemoteFile
from lrl.weights.group_calls import Failures, GeneratorGroupCalls
from lrl.weights.staged_file import UnnamedFile, checksum, stage_unnamed
from lrl.weights.transport import Transport
from lrl.weights.upload_slots import UploadSlots, is_here
from lrl.weights.wire import TensorSpec, Weights, cast_for_transfer, tensor_specs

log = logging.getLogger(__name__)

STALL_SHARE = 0.25
"""Share of a phase's deadline without any upload that ended, after which the trainer opens one more
slot."""


class FileServer(TokenServer):
    """Serves staged files to the generators; see `TokenServer`."""

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        self.files: dict[str, Path] = {}
        """What it serves, by name."""
        super().__init__(endpoint, token, [web.get(FILES + "{name}", self._serve)])

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = self.files.get(request.match_info["name"])
        if path is None or not await asyncio.to_thread(path.exists):
            return web.json_response(
                {"error": "there is no such version any more"}, status=http.HTTPStatus.NOT_FOUND
            )
        # By the kernel alone without TLS, else in such pieces.
        return web.FileResponse(path, chunk_size=2**20)


@dataclass(frozen=True)
class Staged:
    """A version, or a difference of two, in the trainer's memory."""

    file: UnnamedFile
    remote: RemoteFile

    @classmethod
    def of(cls, file: UnnamedFile, name: str, value: int) -> "Staged":
        """Returns one under a name that no other content has; `value` is the checksum."""
        return cls(file, RemoteFile(f"{name}-{value:016x}", file.path.stat().st_size, value))


class Pull(Transport):
    """The trainer's end: stages and serves the files, and has the generators fetch them."""

    backend = "pull"
    copies = True
    fetches = True
    narrows = True
    middleware = ("lrl.vllm_plugin.pull_routes.PullRoutes",)

    @classmethod
    def join_refusal(cls, same_machine: bool, host: str) -> str:
        """The trainer serves the weights where its generators listen."""
        if same_machine or not is_loopback(host):
            return ""
        return (
            f"serves its weights (pull) at strategy.server.host {host}, which only its own machine "
            "reaches. Start it with an address of its machine that this one reaches, and with "
            "tls_cert and tls_key or insecure."
        )

    @classmethod
    def stored_bytes(cls, weight_bytes: int, pools: int, generators: int) -> int:
        """Two files and a delta for each generator that is here; the trainer's own are in no
        folder."""
        return int(generators * (2 + MAX_DELTA_SHARE) * weight_bytes)

    def __init__(self) -> None:
        self._name = ""
        self._dtype: torch.dtype | None = None
        self._tensors: list[TensorSpec] = []
        self._endpoint = Endpoint()
        self._server: FileServer | None = None
        self._number = 0
        self._older: Staged | None = None  # until the delta to it is made
        self._staged: Staged | None = None
        self._delta: Staged | None = None
        self._base = ""  # the name of the file that the delta needs
        self._fetched: dict[Generator, str] = {}  # the path of the staged version on its machine

    def connect(self, calls: GeneratorGroupCalls, weights: Weights, name: str) -> None:
        """Starts the server of the files at the first call; see `Transport.connect`."""
        if self._server is None:
            own = calls.participants[0].server  # token and settings are those of all
            self._name = name
            self._endpoint = own.settings.endpoint
            self._dtype = (
                None if own.settings.dtype == "auto" else getattr(torch, own.settings.dtype)
            )
            self._server = FileServer(self._endpoint, own.token)
        calls.init_weight_transfer_engine({})

    def stage(self, weights: Weights, use_fallback: bool) -> None:
        """Writes the weights as the generators compute with them; keeps the version before for the
        delta."""
        self._tensors = self._tensors or tensor_specs(weights, self._dtype)
        self._number += 1
        name = f"{self._name}-{self._number}"
        file = UnnamedFile(name)
        try:
            found = stage_unnamed(self._tensors, cast_for_transfer(weights, self._dtype), file)
        except BaseException:
            file.close()
            raise
        staged = Staged.of(file, name, found)
        # Another attempt at one version.
        if self._staged is not None and _same(staged, self._staged):
            file.close()
            return
        _remove(self._older, self._delta)
        self._older = self._staged
        self._staged = staged
        self._delta = None
        self._base = ""
        self._fetched = {}

    def distribute(self, calls: GeneratorGroupCalls) -> Failures:
        assert self._server is not None and self._staged is not None, "connected and staged before"
        if self._older is not None:
            self._make_delta(self._older, self._staged, calls.interrupted)
        self._server.files = {
            one.remote.name: one.file.path for one in (self._staged, self._delta) if one is not None
        }
        slots = UploadSlots(STALL_SHARE * calls.deadline_s)
        return calls.try_each(
            FETCH, lambda generator: self._have_fetched(generator, slots, calls.deadline_s)
        )

    def send(self, calls: GeneratorGroupCalls) -> None:
        assert self._staged is not None, "staged before"
        checksum = self._staged.remote.checksum
        calls.start_weight_update()
        calls.update_weights_of(
            lambda generator: {"file": self._fetched[generator], "checksum": checksum}
        )
        calls.finish_weight_update()

    def close(self) -> None:
        """Ends the server and removes the files."""
        if self._server is not None:
            self._server.close()
            self._server = None
        _remove(self._older, self._staged, self._delta)
        self._older = self._staged = self._delta = None

    def _make_delta(self, older: Staged, newer: Staged, interrupted: Callable[[], None]) -> None:
        """Makes the difference of two versions, if it is worth it, and removes the older one."""
        started = time.monotonic()
        name = f"{newer.remote.name}-delta"
        file = UnnamedFile(name)
        try:
            if write_delta(older.file.path, newer.file.path, file.path, interrupted):
                self._delta = Staged.of(file, name, checksum(file.path))
                self._base = older.remote.name
        except OSError as error:
            log.warning(
                "There is no difference of two versions to fetch, and all fetch the whole: %s",
                error,
            )
        finally:
            if self._delta is None:
                file.close()
        if self._delta is not None:
            log.info(
                "The difference of two versions is %.1f %% of one; %.1f s to make.",
                100 * self._delta.remote.size / newer.remote.size,
                time.monotonic() - started,
            )
        _remove(older)
        self._older = None

    async def _have_fetched(
        self, generator: Generator, slots: UploadSlots, deadline_s: float
    ) -> None:
        """Has one generator fetch the version when there is a slot for it."""
        assert self._staged is not None, "staged before"
        started = time.monotonic()
        async with slots.take(generator) as peer:
            left_s = deadline_s - (time.monotonic() - started)
            sources = [self._location(generator)]
            if peer is not None:
                sources.insert(0, peer.server.location)
            order = FetchOrder(
                self._staged.remote,
                sources,
                deadline_s=left_s,
                delta=None if self._delta is None else self._delta.remote,
                base=self._base,
            )
            answer = await generator.client.post(FETCH, asdict(order), deadline_s=left_s)
        report = FetchReport(**answer)
        received = sum(report.received)
        log.info(
            "%s has the weights (%s): %d bytes in %.1f s.",
            generator.name,
            report.how,
            received,
            time.monotonic() - started,
        )
        self._fetched[generator] = report.file
        self.fetched_bytes += received
        self.sent_bytes += report.received[-1]
        await slots.open_at(generator)

    def _location(self, generator: Generator) -> Location:
        """Returns where a generator reaches this server."""
        assert self._server is not None, "connected before"
        seen = ""
        if self._endpoint.is_everywhere and not is_here(generator):
            seen = own_address_towards(generator.client.url)
        return self._endpoint.location(self._server.port, seen)


def _same(one: Staged, other: Staged) -> bool:
    return (one.remote.size, one.remote.checksum) == (other.remote.size, other.remote.checksum)


def _remove(*staged: Staged | None) -> None:
    for one in staged:
        if one is not None:
            one.file.close()
