"""The server that agents take for OpenAI's, for all episodes that a process plays. That of agents
elsewhere has more routes (`lrl.environments.external_agents`).

    POST /KEY/v1/chat/completions    a turn of the policy, whole or as the events of a stream
    GET  /KEY/v1/models              one model, "policy"
    GET  /KEY/v1/models/NAME         the policy, by any name, as in a request for a turn

Each episode has a key of its own, in the address and as the API key; it ends with the episode.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from lrl.environments.agent_conversation import AgentConversation, called, refusal
from lrl.environments.base import Written
from lrl.system.auth import is_allowed
from lrl.system.auth import log as request_log
from lrl.system.endpoint import LOOPBACK

MODEL = "policy"
LONGEST_REQUEST = 2**26
"""Bytes."""
KEPT_KEYS = 10_000
"""Keys of ended episodes that are still known as such."""


class AgentServer:
    """The server. Use: `serve(listener)`, as a task, and `serving(conversation)` for each episode."""

    def __init__(self) -> None:
        self.playing: dict[str, AgentConversation] = {}
        """Episodes that agents play, by their keys."""
        self.url = ""
        self._ended: dict[str, str] = {}
        """Why the episodes of these keys have ended; the oldest are forgotten."""

    def routes(self) -> Sequence[web.RouteDef]:
        """Returns what it serves."""
        return [
            web.post("/{key}/v1/chat/completions", self._chat),
            web.get("/{key}/v1/models{name:(/.+)?}", self._models),
        ]

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serves until it is cancelled."""
        app = web.Application(client_max_size=LONGEST_REQUEST)
        app.add_routes([*self.routes(), web.route("*", "/{path:.*}", self._unknown)])
        runner = web.AppRunner(app, logger=request_log, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener, ssl_context=tls).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def serving(self, conversation: AgentConversation) -> AsyncIterator[dict[str, str]]:
        """Serves a conversation, at an `address_of` it, until the block ends; what is still asked
        then gets an error."""
        key = conversation.key
        self.playing[key] = conversation
        why = ""
        try:
            yield address_of(self.url, key)
        except asyncio.CancelledError as error:
            why = str(error)
            raise
        finally:
            self.end(key, why)

    def end(self, key: str, why: str = "") -> None:
        """Ends an episode; what is still asked in it gets an error that says why. May be called
        twice."""
        if (conversation := self.playing.pop(key, None)) is None:
            return
        words = f"the episode has ended{f' ({why})' if why else ''}, and the policy writes no more"
        self._ended[key] = words
        if len(self._ended) > KEPT_KEYS:
            del self._ended[next(iter(self._ended))]
        for task in conversation.asked:
            task.cancel(words)

    async def body_of(self, request: web.Request) -> Any:
        """Returns the JSON of a request that is allowed."""
        self.episode_of(request)
        try:
            return json.loads(await request.read() or b"{}")
        except (ValueError, RecursionError) as error:
            raise refusal(web.HTTPBadRequest, f"the body is no JSON: {error}") from error

    def episode_of(self, request: web.Request) -> AgentConversation:
        """Returns the episode of a caller with its key, if it is played now: it may end while a body
        is read."""
        key = request.match_info["key"]
        if is_allowed(request.raw_headers, key):
            if key in self.playing:
                return self.playing[key]
            if key in self._ended:
                raise refusal(web.HTTPGone, self._ended[key])
        text = "this address belongs to no episode that is being played"
        raise refusal(web.HTTPUnauthorized, text)

    async def _chat(self, request: web.Request) -> web.Response:
        body = await self.body_of(request)
        conversation = self.episode_of(request)
        retries = request.headers.get("x-stainless-retry-count", "")
        again = retries.isdecimal() and retries.strip("0") != ""
        asked = asyncio.ensure_future(conversation.answer(body, again=again))
        conversation.asked.add(asked)
        asked.add_done_callback(conversation.asked.discard)
        # The turn is recorded, whether or not the agent still waits for it: it asks again then.
        await asyncio.wait({asked})
        try:
            whole = completion(asked.result())
        except asyncio.CancelledError as ended:
            raise refusal(web.HTTPGone, str(ended)) from None
        if not body.get("stream"):
            return web.json_response(whole)
        chunks = map(json.dumps, chunks_of(whole, body.get("stream_options") or {}))
        events = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
        return web.Response(text=events, content_type="text/event-stream")

    async def _models(self, request: web.Request) -> web.Response:
        self.episode_of(request)
        name = request.match_info["name"].removeprefix("/")
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "lrl"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _unknown(self, request: web.Request) -> web.Response:
        served = ", ".join(f"{route.method} {route.path}" for route in self.routes())
        text = f"{request.method} is not served at this address; served are {served}"
        raise refusal(web.HTTPNotFound, text)


_here: dict[asyncio.AbstractEventLoop, tuple[AgentServer, asyncio.Task[None]]] = {}


def server_of_this_process() -> AgentServer:
    """Returns the server for all agents on this event loop, which the first call opens. It listens on
    this machine alone."""
    loop = asyncio.get_running_loop()
    if loop not in _here:
        listener = socket.create_server((LOOPBACK, 0))
        server = AgentServer()
        server.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        _here[loop] = server, asyncio.ensure_future(server.serve(listener))
    return _here[loop][0]


def address_of(url: str, key: str) -> dict[str, str]:
    """Returns what the clients of OpenAI's interface must know."""
    return {"base_url": f"{url}/{key}/v1", "api_key": key}


def completion(turn: Written) -> dict[str, Any]:
    """Returns a turn as OpenAI's interface answers it."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [called(call, call.arguments) for call in turn.calls]
    finish_reason = "tool_calls" if turn.calls else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    tokens = len(turn.token_ids)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        # The prompt's tokens are known where the policy is.
        "usage": {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens},
    }


def chunks_of(whole: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a `completion` as the chunks of a stream."""
    (choice,) = whole["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    head = {name: whole[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    said = {"index": 0, "delta": delta, "finish_reason": None}
    ended = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [head | {"choices": [said]}, head | {"choices": [ended]}]
    if options.get("include_usage"):
        chunks.append(head | {"choices": [], "usage": whole["usage"]})
    return chunks
