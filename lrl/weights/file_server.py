"""The HTTP server of rank 0 from which generators fetch staged files: guarded and encrypted as the generators are."""

import asyncio
import http
import json
from pathlib import Path

from aiohttp import web

from lrl.generators.auth import is_allowed
from lrl.generators.endpoint import Endpoint
from lrl.runtime.event_loop import LoopThread
from lrl.weights.fetch_order import FILES

START_S = 30.0
REJECTION = json.dumps(
    {"error": "These weights belong to a run of lrl and are served only with the token of that run."}
)


class FileServer:
    """A server on a thread of its own, from its making to `close`.

    Args:
        endpoint: The address that it listens on, at a free port, and its TLS.
        token: The run's token; a request without it is answered 401.

    Raises:
        ConfigError: `endpoint.host` is no address of this machine.
    """

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        self.files: dict[str, Path] = {}
        """What it serves, by name."""
        self._token = token
        app = web.Application()
        app.router.add_get(FILES + "{name}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        listener = endpoint.reserve_port()
        self.port: int = listener.getsockname()[1]
        self._loop = LoopThread()

        async def start() -> None:
            await self._runner.setup()
            await web.SockSite(self._runner, listener, ssl_context=endpoint.identity()).start()

        self._loop.wait(start(), START_S, "starting the server of the weights")

    def close(self) -> None:
        """Ends it, and every transfer; idempotent."""
        if not self._loop.closed:
            self._loop.wait(self._runner.cleanup(), START_S, "ending the server of the weights")
            self._loop.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        given = [value.encode() for value in request.headers.getall("Authorization", [])]
        if not is_allowed(given, self._token):
            raise web.HTTPUnauthorized(text=REJECTION, content_type="application/json")
        path = self.files.get(request.match_info["name"])
        if path is None or not await asyncio.to_thread(path.exists):
            return web.json_response({"error": "there is no such version any more"}, status=http.HTTPStatus.NOT_FOUND)
        return web.FileResponse(path, chunk_size=2**20)  # by the kernel alone without TLS, else in such pieces
