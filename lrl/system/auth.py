"""Authentication of a generator's callers: every route but /health needs the run's token.

vLLM's own `--api-key` leaves the RL routes open: with a key set, /pause, /update_weights,
/collective_rpc and the like still answer without it, so anyone with access to the port can stop a
run or replace its weights. This middleware stands in front of all of vLLM's routes. The token comes
by the environment, which only the same user can read: other users can read a command line and a
log.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lrl.system.config_errors import fault

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_VARIABLE = "LRL_GENERATOR_TOKEN"
OPEN_PATH = "/health"
SHORTEST_SECRET = 16
"""Characters."""
REJECTION = (
    '{"error": "This server belongs to a run of lrl and answers only with the token of that run."}'
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
        if scope["type"] == "lifespan" or scope["path"] == OPEN_PATH or self._has_token(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REJECTION.encode()})

    def _has_token(self, scope: Scope) -> bool:
        credentials = [value for name, value in scope["headers"] if name == b"authorization"]
        return is_allowed(credentials, self._token)


def is_allowed(credentials: Sequence[bytes], token: str) -> bool:
    """Whether the Authorization headers of a request are the one with `token`."""
    # In constant time: the time a wrong token takes must not show how much of it was right.
    return len(credentials) == 1 and hmac.compare_digest(credentials[0], bearer(token).encode())


def given_secret(variable: str, holder_can: str) -> str:
    """Returns the secret in a variable, which is removed from the environment, or a random one.

    Args:
        variable: Its name.
        holder_can: What whoever has the secret can do.

    Raises:
        ConfigError: It is easily guessed.
    """
    secret = os.environ.pop(variable, "")
    if secret and len(secret) < SHORTEST_SECRET:
        fault(
            f"{variable} has {len(secret)} characters: whoever guesses it can {holder_can}. Give "
            f"{SHORTEST_SECRET} or more: export {variable}=$(openssl rand -hex 32)"
        )
    return secret or secrets.token_urlsafe(32)


def bearer(token: str) -> str:
    """Returns the value of the Authorization header."""
    return f"Bearer {token}"
