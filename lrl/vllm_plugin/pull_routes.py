"""The routes of a generator that fetches its weights; an ASGI middleware of vLLM's API server,
guarded by the run's token.

    POST /lrl/fetch               fetches a version into this machine's shared memory (`FetchOrder`, `FetchReport`)
    GET  /lrl/parts/VERSION/...   serves the blocks of a version that are here to other generators

A fetch runs on a thread besides the server's event loop; the generator writes meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lrl.errors import FetchFailed
from lrl.generators.server import FILES_VARIABLE
from lrl.system.auth import TOKEN_VARIABLE
from lrl.vllm_plugin.fetched_files import LOOK_S, FetchedFiles
from lrl.weights.fetch_order import FETCH, PARTS, FetchOrder

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

HOLD_S = 0.5
"""Seconds for which a request waits for a block that is on its way here."""


class PullRoutes:
    """The middleware, given to vLLM by its class path."""

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
