"""The route by which the trainer ends a collective transfer inside a generator.

A worker that waits for a lost member waits in its GPU for ever: NCCL has no deadline, and vLLM's
other routes queue behind the call that waits. So the API server answers this route by itself and
leaves a mark, a file in the temporary folder that the supervisor gives to all processes of the
generator; the worker looks for it (`lrl.vllm_plugin.nccl_engine`).

Each communicator has a name of its own, so a mark never meets another transfer than its own.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.weights.communicator import ABORT_ROUTE

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_PATH = re.compile(re.escape(ABORT_ROUTE) + r"([0-9a-f]{16})")
DONE = b'{"message": "The transfer ends."}'


def abort_mark(name: str) -> Path:
    """Returns the file that ends the transfer; the supervisor removes it with the temporary
    folder."""
    return Path(tempfile.gettempdir()) / f"lrl-abort-{name}"


class AbortRoute:
    """ASGI middleware, given to vLLM by its class path; comes after the one that checks the
    token."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Leaves the mark for a POST to the route, and forwards everything else."""
        found = (
            _PATH.fullmatch(scope["path"])
            if scope["type"] == "http" and scope["method"] == "POST"
            else None
        )
        if found is None:
            await self.app(scope, receive, send)
            return
        abort_mark(found[1]).touch()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": DONE})
