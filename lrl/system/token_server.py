"""An HTTP server of rank 0 or of a member with workers: guarded by the run's token and encrypted as
the generators are."""

import logging
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from lrl.system.auth import REJECTION, is_allowed
from lrl.system.endpoint import Endpoint, Location
from lrl.system.event_loop import LoopThread

log = logging.getLogger(__name__)
"""Of all servers of lrl: nothing of malformed requests, which anybody can send, and whose errors
show the headers."""
log.addFilter(
    lambda record: (
        not isinstance(
            record.exc_info and record.exc_info[1], HttpProcessingError | web.RequestPayloadError
        )
    )
)
START_S = 30.0


class TokenServer:
    """A server on a thread of its own, from its making to `close`.

    Args:
        endpoint: The address that it listens on, and its TLS.
        token: The run's token; a request without it is answered 401.
        routes: What it answers.
        port: Its port; 0 for a free one.
        longest_request: Bytes of the body of a request; 0 for any number.
        open_paths: Paths that it answers without the token.

    Raises:
        ConfigError: `endpoint.host` is no address of this machine, or the port is taken.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        token: str,
        routes: Sequence[web.RouteDef],
        port: int = 0,
        longest_request: int = 2**20,
        open_paths: Collection[str] = (),
    ) -> None:
        self._open_paths = open_paths
        self.endpoint = endpoint
        self.token = token
        app = web.Application(middlewares=[self._guard], client_max_size=longest_request)
        app.add_routes(routes)
        # What a client no longer waits for ends: its worker is then free for other work.
        self._runner = web.AppRunner(
            app, logger=log, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        listener = endpoint.reserve_port(port)
        self.port: int = listener.getsockname()[1]
        self._loop = LoopThread("lrl-server")

        async def start() -> None:
            await self._runner.setup()
            await web.SockSite(self._runner, listener, ssl_context=endpoint.identity()).start()

        self._loop.wait(start(), START_S, "starting an HTTP server")

    def location(self, address: str = "") -> Location:
        """See `Endpoint.location`."""
        return self.endpoint.location(self.port, address)

    def wait(self, work: Coroutine[Any, Any, None], deadline_s: float, purpose: str) -> None:
        """Does `work` on the server's thread; see `LoopThread.wait`."""
        self._loop.wait(work, deadline_s, purpose)

    def close(self) -> None:
        """Ends it, and every transfer; idempotent."""
        if not self._loop.closed:
            self._loop.wait(self._runner.cleanup(), START_S, "ending an HTTP server")
            self._loop.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = credentials_of(request)
        if request.path not in self._open_paths and not is_allowed(given, self.token):
            raise web.HTTPUnauthorized(text=REJECTION, content_type="application/json")
        return await handler(request)


def credentials_of(request: web.BaseRequest) -> list[bytes]:
    """Returns the Authorization headers of a request, also those that are no text."""
    headers = request.headers.getall("Authorization", [])
    return [value.encode(errors="surrogateescape") for value in headers]
