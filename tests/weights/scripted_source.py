"""A server of the parts of all ranks that breaks, stalls or lies as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

from aiohttp import web

from lrl.system.endpoint import Endpoint
from lrl.weights.parts import Part, PartServer, content_of

Fault = Literal["none", "cut", "stall", "damage", "short", "gone", "not yet"]


class ScriptedSource(PartServer):
    """Has one version, and the fault of each request for a block in their order; those after the
    last have none."""

    def __init__(self, parts: Sequence[Part], token: str, faults: Sequence[Fault]) -> None:
        self.of_ranks = parts
        self.faults = list(faults)
        self.asked: list[str] = []
        """Blocks or their differences."""
        super().__init__(Endpoint(), token, {})

    async def _serve(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        rank, what = request.match_info["part"], request.match_info["what"]
        fault: Fault = "none"
        if what not in ("header", "delta"):
            self.asked.append(f"{rank}/{what}")
            fault = self.faults.pop(0) if self.faults else "none"
        body = await asyncio.to_thread(content_of, self.of_ranks[int(rank)], what)
        if fault == "damage":
            body = bytes([body[0] ^ 1]) + body[1:]
        answer = web.StreamResponse(status={"gone": 404, "not yet": 409}.get(fault, 200))
        answer.content_length = len(body)
        answer.force_close()
        await answer.prepare(request)
        sent = {"cut": len(body) // 2, "stall": len(body) // 2, "short": len(body) - 1}
        await answer.write(body[: sent.get(fault, len(body))])
        if fault == "stall":
            await asyncio.sleep(300)
        return answer
