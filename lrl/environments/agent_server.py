"""The server that agents of a process take for OpenAI's: one for all episodes that it plays.

    POST /KEY/v1/chat/completions    a turn of the policy, whole or as a stream of events
    GET  /KEY/v1/models              one model, "policy"
    GET  /KEY/v1/models/NAME         the policy, by any name, as in a request for a turn

Each episode has a key of its own, in the address and as the API key; it ends with the episode. The
server listens on this machine alone. `external_server` has that of agents which lrl does not start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web

from lrl.environments.agent_conversation import AgentConversation
from lrl.environments.base import Written
from lrl.environments.chat_request import RequestError
from lrl.system.auth import is_allowed
from lrl.system.endpoint import LOOPBACK
from lrl.system.token_server import credentials_of
from lrl.system.token_server import log as request_log

log = logging.getLogger(__name__)

MODEL = "policy"
CHAT = "/v1/chat/completions"
KEEP_ALIVE_S = 10.0
"""Seconds between two signs of life of a stream whose turn is not whole: clients give up after some
silence."""
LONGEST_REQUEST = 2**26
"""Bytes."""
KEPT_KEYS = 10_000
"""Keys of ended episodes that are still known as such."""


class AgentAddress(NamedTuple):
    """The address of the policy, and the key for it."""

    base_url: str
    """As the clients of OpenAI's interface take it, with `/v1`."""
    api_key: str


class AgentServer:
    """The server. Use: `await start()`, then `serving(conversation)` for each episode."""

    serves = f"POST {CHAT}"
    """Its routes, for those who ask for others."""

    def __init__(self) -> None:
        self._conversations: dict[str, AgentConversation] = {}
        self._answering: dict[str, set[asyncio.Task[Written]]] = {}
        """Requests of each episode for which the policy still writes."""
        self._ended: dict[str, str] = {}
        """Why the episodes of these keys have ended; the oldest are forgotten."""
        self._port = 0

    async def start(self) -> None:
        """Opens it at a free port."""
        runner = web.AppRunner(self._app(), logger=request_log, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, LOOPBACK, 0)
        await site.start()
        self._port = runner.addresses[0][1]

    @asynccontextmanager
    async def serving(self, conversation: AgentConversation) -> AsyncIterator[AgentAddress]:
        """Serves a conversation, until the block ends; what is still asked then gets an error."""
        key = self.begin(conversation)
        why = ""
        try:
            yield AgentAddress(f"http://{LOOPBACK}:{self._port}/{key}/v1", key)
        except asyncio.CancelledError as error:
            why = str(error)
            raise
        finally:
            self.end(key, why)

    def begin(self, conversation: AgentConversation) -> str:
        """Serves a conversation from now on; returns its key."""
        key = secrets.token_hex(16)
        self._conversations[key] = conversation
        self._answering[key] = set()
        return key

    def end(self, key: str, why: str = "") -> None:
        """Ends a conversation; what is still asked in it gets an error that says why. May be called
        twice."""
        if self._conversations.pop(key, None) is None:
            return
        self._ended[key] = why
        if len(self._ended) > KEPT_KEYS:
            del self._ended[next(iter(self._ended))]
        for task in self._answering.pop(key):
            task.cancel(self.ended(key))

    def ended(self, key: str) -> str:
        """Returns what those hear who ask in a conversation that has ended."""
        why = f" ({self._ended[key]})" if self._ended.get(key) else ""
        return f"the episode has ended{why}, and the policy writes no more turns in it"

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/{key}" + CHAT, self._chat),
            web.get("/{key}/v1/models{name:(/.+)?}", self._models),
        ]

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=LONGEST_REQUEST)
        app.add_routes(self._routes())
        app.router.add_route("*", "/{path:.*}", self._unknown)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal_of(request)) is not None:
            return error_response(*refusal)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError):
            return error_response(400, "the body is no JSON")
        key = request.match_info["key"]
        if key not in self._conversations:  # it has ended while the body was read
            return error_response(410, self.ended(key))
        answering = asyncio.ensure_future(
            self._conversations[key].answer(
                body, again=_is_sent_again(request), key=request.headers.get("Idempotency-Key")
            )
        )
        pending = self._answering[key]
        pending.add(answering)
        answering.add_done_callback(pending.discard)
        if isinstance(body, dict) and body.get("stream"):
            return await _stream(request, body, answering)
        # The turn is recorded, whether or not the agent still waits for it: it asks again then.
        await asyncio.wait({answering})
        if (refusal := _refusal(answering)) is not None:
            return error_response(*refusal)
        return web.json_response(completion(answering.result()))

    async def _models(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal_of(request)) is not None:
            return error_response(*refusal)
        name = request.match_info["name"].removeprefix("/")
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "lrl"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _unknown(self, request: web.Request) -> web.Response:
        first, _, rest = request.path.removeprefix("/").partition("/")
        asked = f"{request.method} /{rest or first}"
        return error_response(404, f"{asked} is not served; an agent is: {self.serves}")

    def _refusal_of(self, request: web.Request) -> tuple[int, str] | None:
        """Returns status and message for a caller without the key of an episode that is played."""
        key = request.match_info["key"]
        if has_key(request, key):
            if key in self._conversations:
                return None
            if key in self._ended:
                return 410, self.ended(key)
        return 401, "this address belongs to no episode that is being played"


def has_key(request: web.Request, key: str) -> bool:
    """Whether a request has this API key."""
    return is_allowed(credentials_of(request), key)


_starts: dict[asyncio.AbstractEventLoop, asyncio.Task[AgentServer]] = {}


async def server_of_this_process() -> AgentServer:
    """Returns the server for all agents on this event loop; the first call opens it."""
    loop = asyncio.get_running_loop()
    if loop not in _starts:
        _starts[loop] = asyncio.ensure_future(_started())
    # An episode that ends meanwhile does not end the server's start.
    return await asyncio.shield(_starts[loop])


async def _started() -> AgentServer:
    server = AgentServer()
    await server.start()
    return server


def completion(turn: Written) -> dict[str, Any]:
    """Returns a turn as OpenAI's interface answers it."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
    tokens = len(turn.token_ids)
    return {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": "tool_calls" if turn.calls else "stop",
                "logprobs": None,
            }
        ],
        # The prompt's tokens are known where the policy is.
        "usage": {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens},
    }


async def _stream(
    request: web.Request, body: dict[str, Any], answering: asyncio.Task[Written]
) -> web.StreamResponse:
    """Answers with the events of a stream, which are made when the turn is whole."""
    # An error of the request comes at once, before the head says that all is well.
    await asyncio.wait({answering}, timeout=0.05)
    if answering.done() and (refusal := _refusal(answering)) is not None:
        return error_response(*refusal)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    try:
        await _write_events(response, body, answering)
    except ConnectionResetError:  # the agent waits no longer; the turn is recorded all the same
        log.debug("%s: the agent has closed its stream", request.path)
    return response


async def _write_events(
    response: web.StreamResponse, body: dict[str, Any], answering: asyncio.Task[Written]
) -> None:
    while not (await asyncio.wait({answering}, timeout=KEEP_ALIVE_S))[0]:
        await response.write(b": the policy writes\n\n")
    if (refusal := _refusal(answering)) is not None:
        chunks = [_error_body(*refusal)]
    else:
        chunks = _chunks(completion(answering.result()), body.get("stream_options") or {})
    for chunk in chunks:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")


def _chunks(whole: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    choice = whole["choices"][0]
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


def _is_sent_again(request: web.Request) -> bool:
    count = request.headers.get("x-stainless-retry-count", "")
    return count.isdecimal() and count.strip("0") != ""


def _refusal(answering: asyncio.Task[Written]) -> tuple[int, str] | None:
    """Returns status and message of a request that has ended without a turn; raises an error that
    is not the agent's."""
    try:
        error = answering.exception()
    except asyncio.CancelledError as ended:
        return 410, str(ended)
    if isinstance(error, RequestError):
        return 400, str(error)
    if error is not None:
        raise error
    return None


def error_response(status: int, message: str) -> web.Response:
    """Returns an error as OpenAI's interface answers it."""
    return web.json_response(_error_body(status, message), status=status)


def _error_body(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": str(status)}}
