"""The server on rank 0 from which generators fetch staged files."""

import asyncio
import http
from pathlib import Path

from aiohttp import web

from lrl.system.endpoint import Endpoint
from lrl.system.token_server import TokenServer
from lrl.weights.fetch_order import FILES


class FileServer(TokenServer):
    """Serves `files`; see `TokenServer`."""

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
