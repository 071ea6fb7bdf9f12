"""A small HTTP proxy in front of a generator: it passes every request on, and breaks the requests
of its fault.

It runs on its own thread; neither trainer nor generator knows of a fault beforehand.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
from aiohttp import web

from lrl.generators.client import GENERATE
from lrl.system.event_loop import LoopThread

HOST = "127.0.0.1"
DEADLINE_S = 10.0
"""For starting and closing a proxy."""
PROBE_SALT = "proof-"
"""Start of a proof's `cache_salt`, and of no other request's."""

Kind = Literal["cut", "refused", "silent", "late", "unanswered", "lie", "damaged"]
"""What becomes of a request; see `Proxy._break`."""


@dataclass
class Fault:
    """A fault of a proxy for the requests of one phase."""

    phase: str
    """The route without its query, or `probe`."""
    kind: Kind
    times: int = 1
    """How many requests it hits."""
    hits: list[float] = field(default_factory=list)
    """Times of its hits, in seconds of `time.monotonic`."""


class Proxy:
    """A proxy in front of the server at `target`; after `late_s` seconds a `late` request is passed
    on, and a `silent` one dropped."""

    def __init__(self, target: str, late_s: float) -> None:
        self.target = target
        self.late_s = late_s
        self.fault: Fault | None = None
        """The fault that is active, if any."""
        self._passing: asyncio.Task[None] | None = None
        self._loop = LoopThread()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.url: str = self._loop.wait(self._start(), DEADLINE_S, "starting a proxy")

    def close(self) -> None:
        if not self._loop.closed:
            self._loop.wait(self._end(), DEADLINE_S, "closing a proxy")
            self._loop.close()

    async def _start(self) -> str:
        # As in lrl's client. A pooled connection was dead after a 500 of the server, and the next
        # request died with it.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A client that has gone ends its handler, and with that the request behind the proxy.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        return f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        if self._passing is not None:
            self._passing.cancel()
        assert self._runner is not None and self._session is not None
        await self._session.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self.fault
        if (
            fault is None
            or fault.phase != phase_of(request.path, body)
            or len(fault.hits) >= fault.times
        ):
            return await self._pass_on(request, body)
        fault.hits.append(time.monotonic())
        return await self._break(fault.kind, request, body)

    async def _break(self, kind: Kind, request: web.Request, body: bytes) -> web.StreamResponse:
        match kind:
            case "refused":
                return web.Response(status=503, text="refused by the proxy")
            case "lie":  # nothing is passed on
                return web.json_response({})
            case "damaged":  # after the checksum was taken
                return await self._with_damaged_file(request, body)
            case "silent":  # nothing is passed on, and there is no answer
                await asyncio.sleep(self.late_s)
            case "late":  # passed on when the deadline is over
                self._passing = asyncio.create_task(self._ask_late(request, body))
                await asyncio.sleep(self.late_s)
            case "unanswered":
                async with self._ask(request, body) as answer:
                    await answer.read()
        return cut(request)

    async def _ask_late(self, request: web.Request, body: bytes) -> None:
        await asyncio.sleep(self.late_s)
        async with self._ask(request, body) as answer:
            await answer.read()

    async def _pass_on(self, request: web.Request, body: bytes) -> web.StreamResponse:
        try:
            async with self._ask(request, body) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except aiohttp.ClientError:
            return cut(request)  # as it would be without a proxy between

    def _ask(self, request: web.Request, body: bytes) -> Any:
        assert self._session is not None
        names = {"Authorization", "Content-Type"} & set(request.headers)
        headers = {name: request.headers[name] for name in names}
        return self._session.request(
            request.method, f"{self.target}{request.path_qs}", data=body, headers=headers
        )

    async def _with_damaged_file(self, request: web.Request, body: bytes) -> web.StreamResponse:
        update = json.loads(body)
        file = Path(update["update_info"]["file"])
        copy = file.with_suffix(".spoilt")
        content = bytearray(file.read_bytes())
        content[-1] ^= 0x40  # the exponent, in every format of floating point
        try:
            copy.write_bytes(content)
            update["update_info"]["file"] = str(copy)
            return await self._pass_on(request, json.dumps(update).encode())
        finally:
            copy.unlink(missing_ok=True)


def cut(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)  # nobody reads it


def phase_of(path: str, body: bytes) -> str:
    if path == GENERATE and str(json.loads(body).get("cache_salt", "")).startswith(PROBE_SALT):
        return "probe"
    return path
