"""The run's token: every server of a run answers only those who have it.

vLLM's own `--api-key` leaves the RL routes open: with a key set, /pause, /update_weights,
/collective_rpc and the like still answer anyone. `TokenMiddleware` guards all of vLLM's routes, and
lrl's own servers are each a `TokenServer`. The token comes by the environment, which only the same
user can read: other users can read a command line and a log.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from lrl.errors import ConfigError
from lrl.system.endpoint import Endpoint, Location
from lrl.system.event_loop import LoopThread

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_VARIABLE = "LRL_GENERATOR_TOKEN"
OPEN_PATH = "/health"
SHORTEST_SECRET = 16
"""Characters."""
REJECTION = (
    '{"error": "This server belongs to a run of lrl and answers only with the token of that run."}'
)
START_S = 30.0

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


class TokenMiddleware:
    """ASGI middleware, given to vLLM by its class path; raises RuntimeError if the environment has
    no token."""

    def __init__(self, app: ASGIApp) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(
                f"{TOKEN_VARIABLE} is not set: the generator would answer requests from anyone."
            )
        self.app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request with the token, and rejects one without."""
        is_open = scope["type"] == "lifespan" or scope["path"] == OPEN_PATH
        if is_open or is_allowed(scope["headers"], self._token):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REJECTION.encode()})


class TokenServer:
    """An HTTP server on a thread of its own, from its making to `close`; a request without `token`
    is answered 401, but for `open_paths`.

    `port` 0 is a free one; ConfigError if it is taken, or `endpoint.host` is no address of this
    machine. `longest_request` is in bytes, 0 for any number.
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
        self.loop = LoopThread("lrl-server")

        async def start() -> None:
            await self._runner.setup()
            await web.SockSite(self._runner, listener, ssl_context=endpoint.identity()).start()

        self.loop.wait(start(), START_S, "starting an HTTP server")

    def location(self, address: str = "") -> Location:
        """See `Endpoint.location`."""
        return self.endpoint.location(self.port, address)

    def close(self) -> None:
        """Ends it, and every transfer; idempotent."""
        if not self.loop.closed:
            self.loop.wait(self._runner.cleanup(), START_S, "ending an HTTP server")
            self.loop.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in self._open_paths and not is_allowed(request.raw_headers, self.token):
            raise web.HTTPUnauthorized(text=REJECTION, content_type="application/json")
        return await handler(request)


def is_allowed(headers: Iterable[tuple[bytes, bytes]], token: str) -> bool:
    """Whether the only Authorization header of a request is the one with `token`."""
    given = [value for name, value in headers if name.lower() == b"authorization"]
    # In constant time: the time a wrong token takes must not show how much of it was right.
    return len(given) == 1 and hmac.compare_digest(given[0], bearer(token).encode())


def given_secret(variable: str, holder_can: str) -> str:
    """Returns the secret in a variable, which is removed from the environment, or a random one.
    ConfigError if it is easily guessed; `holder_can` says what whoever has it can do."""
    secret = os.environ.pop(variable, "")
    if secret and len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"{variable} has {len(secret)} characters: whoever guesses it can {holder_can}. Give "
            f"{SHORTEST_SECRET} or more: export {variable}=$(openssl rand -hex 32)"
        )
    return secret or secrets.token_urlsafe(32)


def bearer(token: str) -> str:
    """Returns the value of the Authorization header."""
    return f"Bearer {token}"
