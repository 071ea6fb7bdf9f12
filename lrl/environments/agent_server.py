"""The server that agents take for OpenAI's: one for all episodes that a process plays, or one of a
run for agents that lrl does not start, which take their episodes there.

    POST /KEY/v1/chat/completions    a turn of the policy, whole or as a stream of events
    GET  /KEY/v1/models              one model, "policy"
    GET  /KEY/v1/models/NAME         the policy, by any name, as in a request for a turn
    POST /episodes                   takes an episode; with the run's key for agents
    POST /KEY/v1/end                 ends an episode that was taken, with a reward or an error

Each episode has a key of its own, in the address and as the API key; it ends with the episode. The
run's key takes episodes and no more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

from lrl.environments.agent_conversation import AgentConversation, RequestError, called
from lrl.environments.base import Written
from lrl.environments.play import finite
from lrl.system.auth import is_allowed
from lrl.system.auth import log as request_log
from lrl.system.endpoint import LOOPBACK

log = logging.getLogger(__name__)

MODEL = "policy"
CHAT = "/v1/chat/completions"
EPISODES = "/episodes"
END = "/v1/end"
RETRY_AFTER_S = 1
"""Seconds after which an agent asks again for an episode, if none waits."""
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


@dataclass(eq=False)
class ServedEpisode:
    """An episode that agents reach by its key.

    Args:
        conversation: Answers the agent's requests.
        row: What an agent that takes the episode is told.
        end: Notes how the agent has ended it, by a reward or an error; None if it has not taken it.
    """

    conversation: AgentConversation
    row: dict[str, Any] = field(default_factory=dict)
    end: Callable[[float, str], None] | None = None
    key: str = field(default_factory=lambda: secrets.token_hex(16))
    answering: set[asyncio.Task[Written]] = field(default_factory=set)
    """Requests for which the policy still writes."""


class Refusal(Exception):
    """An answer of this status to an agent."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AgentServer:
    """The server. Use: `serve(listener)`, as a task, and `serving(conversation)` for each episode.

    Args:
        key: The run's key for agents; empty if they take no episodes here.
        next_episode: Returns an episode that waits for an agent; None if there is none.
    """

    def __init__(
        self, key: str = "", next_episode: Callable[[], ServedEpisode | None] = lambda: None
    ) -> None:
        self.playing: dict[str, ServedEpisode] = {}
        """Episodes that agents play, by their keys."""
        self.url = ""
        """Where it serves, if it is that of a process."""
        self.task: asyncio.Task[None] | None = None
        self._ended: dict[str, str] = {}
        """Why the episodes of these keys have ended; the oldest are forgotten."""
        self._key = key
        self._next_episode = next_episode

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serves until it is cancelled."""
        app = web.Application(client_max_size=LONGEST_REQUEST, middlewares=[_with_refusals])
        app.router.add_post("/{key}" + CHAT, self._chat)
        app.router.add_get("/{key}/v1/models{name:(/.+)?}", self._models)
        if self._key:
            app.router.add_post(EPISODES, self._take)
            app.router.add_post("/{key}" + END, self._end)
        app.router.add_route("*", "/{path:.*}", self._unknown)
        runner = web.AppRunner(app, logger=request_log, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener, ssl_context=tls).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def serving(self, conversation: AgentConversation) -> AsyncIterator[AgentAddress]:
        """Serves a conversation at `url` until the block ends; what is still asked then gets an
        error."""
        episode = ServedEpisode(conversation)
        self.playing[episode.key] = episode
        why = ""
        try:
            yield AgentAddress(f"{self.url}/{episode.key}/v1", episode.key)
        except asyncio.CancelledError as error:
            why = str(error)
            raise
        finally:
            self.end(episode.key, why)

    def end(self, key: str, why: str = "") -> None:
        """Ends an episode; what is still asked in it gets an error that says why. May be called
        twice."""
        if (episode := self.playing.pop(key, None)) is None:
            return
        self._ended[key] = f" ({why})" if why else ""
        if len(self._ended) > KEPT_KEYS:
            del self._ended[next(iter(self._ended))]
        for task in episode.answering:
            task.cancel(self._words_of_end(key))

    def _words_of_end(self, key: str) -> str:
        return f"the episode has ended{self._ended[key]}, and the policy writes no more turns in it"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        episode = self._episode_of(request)
        again = request.headers.get("x-stainless-retry-count", "")
        answering = asyncio.ensure_future(
            episode.conversation.answer(
                body,
                again=again.isdecimal() and again.strip("0") != "",
                key=request.headers.get("Idempotency-Key"),
            )
        )
        episode.answering.add(answering)
        answering.add_done_callback(episode.answering.discard)
        if isinstance(body, dict) and body.get("stream"):
            return await _stream(request, body, answering)
        # The turn is recorded, whether or not the agent still waits for it: it asks again then.
        await asyncio.wait({answering})
        return web.json_response(completion(_turn(answering)))

    async def _models(self, request: web.Request) -> web.Response:
        self._episode_of(request)
        name = request.match_info["name"].removeprefix("/")
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "lrl"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    async def _take(self, request: web.Request) -> web.Response:
        if not is_allowed(request.raw_headers, self._key):
            raise Refusal(401, "the API key is not the run's key for agents")
        episode = self._next_episode()
        if episode is None:
            text = "no episode waits for an agent: as many are played as the run may need now"
            response = _error_response(Refusal(429, f"{text}. Ask again"))
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
            return response
        self.playing[episode.key] = episode
        # By the address at which the agent has reached this server, be it a tunnel's.
        url = f"{request.scheme}://{request.host}/{episode.key}/v1"
        told = episode.row | AgentAddress(url, episode.key)._asdict()
        return web.json_response(told, dumps=partial(json.dumps, default=str))

    async def _end(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        episode = self._episode_of(request)
        try:
            reward, error = _end_in(body)
        except (TypeError, ValueError) as wrong:
            raise Refusal(400, str(wrong)) from wrong
        if not error and not episode.conversation.turns:
            text = "the policy has not written a turn yet. Ask for one, or give an `error`"
            raise Refusal(400, text)
        assert episode.end is not None, "an agent has taken it"
        episode.end(reward, error)
        self.end(episode.key)
        return web.json_response({})

    async def _unknown(self, request: web.Request) -> web.Response:
        first, _, rest = request.path.removeprefix("/").partition("/")
        own = f"POST {EPISODES}, POST /KEY{CHAT}, POST /KEY{END}" if self._key else f"POST {CHAT}"
        raise Refusal(404, f"{request.method} /{rest or first} is not served; an agent is: {own}")

    async def _body(self, request: web.Request) -> Any:
        self._episode_of(request)
        try:
            return json.loads(await request.read() or b"{}")
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is no JSON: {error}") from error

    def _episode_of(self, request: web.Request) -> ServedEpisode:
        """Returns the episode of a caller with its key, if it is played now: it may end while a body
        is read."""
        key = request.match_info["key"]
        if is_allowed(request.raw_headers, key):
            if key in self.playing:
                return self.playing[key]
            if key in self._ended:
                raise Refusal(410, self._words_of_end(key))
        raise Refusal(401, "this address belongs to no episode that is being played")


_here: dict[asyncio.AbstractEventLoop, AgentServer] = {}


def server_of_this_process() -> AgentServer:
    """Returns the server for all agents on this event loop, which the first call opens. It listens on
    this machine alone."""
    loop = asyncio.get_running_loop()
    if loop not in _here:
        listener = socket.create_server((LOOPBACK, 0))
        server = _here[loop] = AgentServer()
        server.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        server.task = asyncio.ensure_future(server.serve(listener))
    return _here[loop]


def completion(turn: Written) -> dict[str, Any]:
    """Returns a turn as OpenAI's interface answers it."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [called(call.id, call.name, call.arguments) for call in turn.calls]
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
    if answering.done():
        _turn(answering)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    try:
        while not (await asyncio.wait({answering}, timeout=KEEP_ALIVE_S))[0]:
            await response.write(b": the policy writes\n\n")
        for chunk in _chunks(answering, body.get("stream_options") or {}):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    except ConnectionResetError:  # the agent waits no longer; the turn is recorded all the same
        log.debug("%s: the agent has closed its stream", request.path)
    return response


def _chunks(answering: asyncio.Task[Written], options: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        whole = completion(_turn(answering))
    except Refusal as refusal:
        return [_error_body(refusal)]
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


def _turn(answering: asyncio.Task[Written]) -> Written:
    """Returns the turn of a request that has ended; raises Refusal if it has none through the
    agent, or because its episode has ended."""
    try:
        return answering.result()
    except asyncio.CancelledError as ended:
        raise Refusal(410, str(ended)) from None
    except RequestError as error:
        raise Refusal(400, str(error)) from None


def _end_in(body: Any) -> tuple[float, str]:
    """Returns reward and error in the body of a request; raises TypeError or ValueError for
    others."""
    if not isinstance(body, dict) or body.keys() - {"reward", "error"}:
        raise ValueError('give {"reward": 0.5}, {"error": "why"} or {}')
    reward, error = body.get("reward"), body.get("error")
    if error is not None and not (error and isinstance(error, str)):
        raise TypeError("`error` is no text")
    return 0.0 if reward is None else finite(reward), error or ""


@web.middleware
async def _with_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refusal as refusal:
        return _error_response(refusal)


def _error_response(refusal: Refusal) -> web.Response:
    return web.json_response(_error_body(refusal), status=refusal.status)


def _error_body(refusal: Refusal) -> dict[str, Any]:
    error = {"message": str(refusal), "type": "invalid_request_error", "code": str(refusal.status)}
    return {"error": error}
