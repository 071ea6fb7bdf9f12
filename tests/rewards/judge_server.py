"""A real server for a judge or a reward model, which answers each response as a test says."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.test_utils import RawTestServer

from tests.event_loop import run

TEMPLATE = "Score it from 0 to 10.\n{response}"
"""The line before the form of the answer is the response, by which the server chooses its reply."""


class Reply(NamedTuple):
    status: int
    body: str
    headers: dict[str, str]


HANG = Reply(0, "hang", {})
CLOSE = Reply(0, "close", {})


def says(text: str | None, finish_reason: str = "stop") -> Reply:
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    return Reply(200, json.dumps({"choices": choices}), {})


def fails(status: int, message: str = "no", **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, json.dumps({"error": {"message": message}}), named)


def gives(*scores: float) -> Reply:
    """What vLLM's route for classification answers."""
    labels = [{"index": 0, "label": "LABEL_0", "probs": scores, "num_classes": len(scores)}]
    return Reply(200, json.dumps({"object": "list", "data": labels}), {})


class JudgeServer:
    route = "/v1/chat/completions"
    usual = says('{"reason": "Well.", "score": 7}')

    def __init__(self) -> None:
        self.replies: dict[str, list[Reply]] = {}
        """By response, in order; the last one stays. Other responses get `usual`."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked: Counter[str] = Counter()  # by response
        self.together = 0  # requests for which the first answer waits
        self.url = ""

    def reply_to(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        response = body["messages"][-1]["content"].partition("\n\n")[0].splitlines()[-1]
        self.bodies.append(body)
        self.headers.append(headers)
        self.asked[response] += 1
        script = self.replies.get(response, [self.usual])
        reply = script[0] if len(script) == 1 else script.pop(0)
        return reply if path.endswith(self.route) else fails(404, f"no route {path}")

    async def respond(self, request: web.BaseRequest) -> web.Response:
        headers = {name.title(): value for name, value in request.headers.items()}
        reply = self.reply_to(request.path, headers, await request.json())
        while self.asked.total() < self.together:
            await asyncio.sleep(0.01)
        if reply == HANG:
            await asyncio.sleep(600)  # it is cancelled when the client goes
        if reply == CLOSE and request.transport is not None:
            request.transport.abort()
        return web.Response(status=reply.status or 200, text=reply.body, headers=reply.headers)


class ScoreServer(JudgeServer):
    route = "/classify"
    usual = gives(0.5)


@contextmanager
def served(judge_server: JudgeServer | None = None) -> Iterator[JudgeServer]:
    judge_server = judge_server or JudgeServer()
    server = RawTestServer(judge_server.respond)
    run(server.start_server())
    judge_server.url = f"http://127.0.0.1:{server.port}"
    try:
        yield judge_server
    finally:
        run(server.close())
