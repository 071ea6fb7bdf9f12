"""The server that agents take for OpenAI's, for all episodes that a process plays, and their
conversations. The server of agents elsewhere has more routes (`lrl.environments.external_agents`).

    POST /KEY/v1/chat/completions    a turn of the policy, whole or as the events of a stream
    GET  /KEY/v1/models              one model, "policy"
    GET  /KEY/v1/models/NAME         the policy, by any name, as in a request for a turn

Each episode has a key of its own, in the address and as the API key; it ends with the episode.

A request holds a whole conversation. What it adds to one that was answered is what the policy reads
next; the turns themselves are never read again, so nothing is tokenised twice. An agent that says
something else of the past, or gives other tools, has begun a branch. It continues the longest
conversation that says the same, or begins anew with all of its messages: tokens that were read
otherwise are never patched.

The policy samples by the run's settings, and the trainer computes log-probs of that distribution.
So what would change the distribution is refused, or left out and said so; it is never obeyed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from lrl.environments.base import BEGINNING, Message, Policy, Written, parsed_arguments
from lrl.system.auth import is_allowed
from lrl.system.auth import log as request_log
from lrl.system.endpoint import LOOPBACK

MODEL = "policy"
LONGEST_REQUEST = 2**26
"""Bytes."""
ENDED = "the episode has ended, and the policy writes no more"
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(["n", "top_p", "best_of", "length_penalty"], 1),
    **dict.fromkeys(["frequency_penalty", "presence_penalty", "min_tokens"], 0),
    **dict.fromkeys(["logprobs", "use_beam_search", "ignore_eos", "echo"], False),
    **dict.fromkeys(["parallel_tool_calls", "add_generation_prompt"], True),
    **dict.fromkeys(["stop", "stop_token_ids", "bad_words", "allowed_token_ids", "documents"], []),
    **dict.fromkeys(["logit_bias", "chat_template_kwargs"], {}),
    "continue_final_message": False,
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    # Every value of these asks for something.
    **dict.fromkeys(["temperature", "max_tokens", "max_completion_tokens", "seed", "top_k"]),
    **dict.fromkeys(["min_p", "top_logprobs", "repetition_penalty", "functions", "function_call"]),
    **dict.fromkeys(["reasoning_effort", "verbosity", "prediction", "audio", "web_search_options"]),
    **dict.fromkeys(["chat_template", "structured_outputs", "guided_json", "guided_regex"]),
    **dict.fromkeys(["guided_choice", "guided_grammar", "prompt_logprobs"]),
    **dict.fromkeys(["truncate_prompt_tokens", "thinking_token_budget"]),
}
"""Settings of a request, OpenAI's and vLLM's, that the policy does not follow, with the value that
asks for nothing; null asks for nothing either."""


def refusal(kind: type[web.HTTPError], message: str) -> web.HTTPError:
    """Returns the answer to a request that is refused, for the author of the agent."""
    code = str(kind.status_code)
    error = {"message": message, "type": "invalid_request_error", "code": code}
    return kind(text=json.dumps({"error": error}), content_type="application/json")


class Answered(NamedTuple):
    """A request that the policy has answered."""

    history: list[Message]
    """Its messages, and the answer."""
    tools: list[dict[str, Any]]
    turn: Written


class AgentConversation:
    """The conversations of one episode; see `Agent` for `ignore` and `branches`."""

    def __init__(self, policy: Policy, ignore: Collection[str], branches: bool = False) -> None:
        self.key = secrets.token_hex(16)
        """By which the agent finds it."""
        self.asked: set[asyncio.Task[Written]] = set()
        """Requests for which the policy still writes."""
        self._policy = policy
        self._ignore = ignore
        self._branches = branches
        self.answered: list[Answered] = []
        """By the number of the turn."""
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, body: Any, *, again: bool = False) -> Written:
        """Returns a turn of the policy. If the request is refused, the conversation stays as it
        was; `again` says that the agent has sent it before."""
        messages, tools = read_request(body, ignore=self._ignore)
        # A request that is sent again may come while the first one is still being answered.
        async with self._one_at_a_time:
            for one in reversed(self.answered) if again else ():
                if _same(messages, one.history[:-1]):
                    return one.turn
            last = len(self.answered) - 1
            after = self._continued(messages, tools)
            if after != last and not self._branches:
                raise refusal(
                    web.HTTPBadRequest,
                    "it does not continue the last request, as it must without Agent.branches: the "
                    "same tools, all that was said, and more that is no assistant's",
                )
            begins = after == BEGINNING
            known = 0 if begins else len(self.answered[after].history)
            turn = await self._policy.turn(
                messages[known:],
                tools=tools if begins else (),
                after=None if after == last else after,
            )
            history = [*messages, turn_message(turn, parsed_arguments)]
            self.answered.append(Answered(history, tools, turn))
            return turn

    def _continued(self, messages: list[Message], tools: list[dict[str, Any]]) -> int:
        """Returns the number of the turn with the longest history that the request continues;
        `BEGINNING` if it continues none."""
        found, longest = BEGINNING, 0
        for number, one in enumerate(self.answered):
            known = len(one.history)
            added = messages[known:]
            if (
                added
                and known >= longest
                and tools == one.tools
                and _same(messages[:known], one.history)
                and not any(message["role"] == "assistant" for message in added)
            ):
                found, longest = number, known
        return found


def read_request(
    body: Any, *, ignore: Collection[str]
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Returns the messages and the tools of a request; refuses one that asks for what the policy
    does not do, but for the settings `ignore`, or that cannot be read."""
    try:
        refused = [name for name in NEUTRAL if name not in ignore and _asks(body, name)]
        messages = _messages(body["messages"])
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        for tool in tools or []:
            _check_name(tool["function"])
        (body.get("stream_options") or {}).get("include_usage")
    except (AttributeError, LookupError, TypeError) as error:
        raise refusal(web.HTTPBadRequest, f"the body is no chat: {error!r}") from error
    if refused:
        raise refusal(
            web.HTTPBadRequest,
            f"`{refused[0]}` is {body[refused[0]]!r:.80}, and the policy samples as the run does. "
            "Leave it out of the request, or name it in Agent.ignore to have it left out",
        )
    return messages, tools or []


def turn_message(turn: Written, arguments_of: Callable[[str], Any]) -> Message:
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.calls:
        message["tool_calls"] = [
            _call(call.id, call.name, arguments_of(call.arguments)) for call in turn.calls
        ]
    return message


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether messages differ by nothing but outer white space of the text, and the spelling of a
    call's arguments: agents send the policy's turns back with others."""
    return list(map(_said, one)) == list(map(_said, other))


def _said(message: Message) -> tuple[Any, ...]:
    return (
        message["role"],
        message["content"].strip(),
        message.get("tool_calls") or [],
        message.get("tool_call_id"),
    )


def _asks(body: dict[str, Any], name: str) -> bool:
    """Whether a request asks for something by this setting."""
    value = body.get(name)
    if name == "tool_choice" and value == "none":  # the tools are not shown then
        return False
    return value is not None and value != NEUTRAL[name]


def _messages(found: list[dict[str, Any]]) -> list[Message]:
    """Returns messages with texts as contents, and arguments of calls as mappings where they are
    JSON of one: chat templates show those."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    for one in found:
        role = "system" if one["role"] == "developer" else one["role"]
        message: Message = {"role": role, "content": _text(one.get("content"))}
        if calls := one.get("tool_calls"):
            message["tool_calls"] = [_read_call(call) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if role == "tool":
            call_id = str(one.get("tool_call_id") or "")
            message["tool_call_id"] = call_id
            message["name"] = str(one.get("name") or names.get(call_id) or "tool")
        messages.append(message)
    if not messages:
        raise LookupError("`messages` is empty")
    return messages


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    _check_name(function)
    arguments = parsed_arguments(function.get("arguments"))
    return _call(str(call.get("id") or ""), function["name"], arguments)


def _check_name(function: dict[str, Any]) -> None:
    if not isinstance(function["name"], str):
        raise TypeError(f"the name of a function is {function['name']!r}")


def _text(content: Any) -> str:
    """Returns a content as text; parts of other kinds are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if not isinstance(part.get("text"), str):
            raise TypeError(f"a part of type {part.get('type')!r}: the policy reads text")
    return "".join(part["text"] for part in content)


class AgentServer:
    """Use: `serve(listener)`, as a task; put each episode into `playing`, and `end` it."""

    def __init__(self) -> None:
        self.playing: dict[str, AgentConversation] = {}
        """Episodes that agents play, by their keys (`address_of`)."""
        self.url = ""

    def routes(self) -> Sequence[web.RouteDef]:
        return [
            web.post("/{key}/v1/chat/completions", self._chat),
            web.get("/{key}/v1/models{name:(/.+)?}", self._models),
        ]

    async def serve(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serves until it is cancelled."""
        app = web.Application(client_max_size=LONGEST_REQUEST)
        app.add_routes(self.routes())
        runner = web.AppRunner(app, logger=request_log, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, listener, ssl_context=tls).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    def end(self, key: str) -> None:
        """Ends an episode; what is still asked in it gets an error. Idempotent."""
        if (conversation := self.playing.pop(key, None)) is not None:
            for task in conversation.asked:
                task.cancel()

    async def body_of(self, request: web.Request) -> Any:
        self.episode_of(request)
        try:
            return json.loads(await request.read() or b"{}")
        except (ValueError, RecursionError) as error:
            raise refusal(web.HTTPBadRequest, f"the body is no JSON: {error}") from error

    def episode_of(self, request: web.Request) -> AgentConversation:
        """Returns the episode of a caller with its key, if it is played now: it may end while a
        body is read."""
        key = request.match_info["key"]
        if not is_allowed(request.raw_headers, key):
            raise refusal(web.HTTPUnauthorized, "the API key is not this address's")
        if key not in self.playing:
            raise refusal(web.HTTPGone, ENDED)
        return self.playing[key]

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
        except asyncio.CancelledError:
            raise refusal(web.HTTPGone, ENDED) from None
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


_here: dict[asyncio.AbstractEventLoop, tuple[AgentServer, asyncio.Task[None]]] = {}


def server_of_this_process() -> AgentServer:
    """Returns the server for all agents on this event loop, which the first call opens. It listens
    on this machine alone."""
    loop = asyncio.get_running_loop()
    if loop not in _here:
        listener = socket.create_server((LOOPBACK, 0))
        server = AgentServer()
        server.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        _here[loop] = server, asyncio.ensure_future(server.serve(listener))
    return _here[loop][0]


def address_of(url: str, key: str) -> dict[str, str]:
    return {"base_url": f"{url}/{key}/v1", "api_key": key}


def completion(turn: Written) -> dict[str, Any]:
    message = turn_message(turn, arguments_of=str)
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
