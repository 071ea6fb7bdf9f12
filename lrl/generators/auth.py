"""Who may call a generator: whoever has the run's token, on every route. Only /health responses everybody.

vLLM's own `--api-key` leaves the RL routes open: with a key set, /pause, /update_weights, /collective_rpc and the like
still answer without it, so that anyone who reaches the port can stop a run or replace its weights. This is middleware
in front of all of vLLM's routes instead. The token comes by the environment, which only the same user can read: a
command line and a log can be read by others.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_VARIABLE = "LRL_GENERATOR_TOKEN"
OPEN_PATH = "/health"
REFUSAL = b'{"error": "This generator belongs to a run of lrl and answers only with the token of that run."}'

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware, given to vLLM by its class path.

    Args:
        app: What is guarded.

    Raises:
        RuntimeError: There is no token in the environment: a server that lets everybody in must not start.
    """

    def __init__(self, app: App) -> None:
        token = os.environ.get(TOKEN_VARIABLE)
        if not token:
            raise RuntimeError(f"{TOKEN_VARIABLE} is not set: the generator would answer everybody.")
        self.app = app
        self._expected = bearer(token).encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass on what may pass; refuse the rest."""
        if scope["type"] == "lifespan" or scope["path"] == OPEN_PATH or self._has_token(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _has_token(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        # In constant time: how long a wrong token takes must not tell how much of it was right.
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def bearer(token: str) -> str:
    """The value of the Authorization header that lets a caller in."""
    return f"Bearer {token}"
