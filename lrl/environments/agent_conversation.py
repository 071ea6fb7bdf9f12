"""The conversations of an agent with the policy, as an episode: a request is an observation, and its
answer a turn.

Each request of an agent holds a whole conversation. What it adds to one that was answered is what the
policy reads next; the turns themselves are never read again, so nothing is tokenised twice. An
agent that says something else of the past, or gives other tools, has begun a branch. It continues
the longest conversation that says the same, or begins anew with all of its messages: tokens that
were read otherwise are never patched.

The turns of an episode are written one after the other, also for requests that come at once: its
record is in the order of time.

The policy samples by the run's settings, and the trainer computes log-probs of that distribution.
So what would change the distribution is refused, or left out and said so; it is never obeyed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lrl.environments.base import BEGINNING, Message, Policy, ToolCall, Written, parsed_arguments

log = logging.getLogger(__name__)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "stop": ([],),
    "top_p": (1,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    # vLLM's own
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
"""Settings of a request that the policy does not follow, with their values that ask for nothing;
null asks for nothing either."""
NEVER_NEUTRAL = (
    *("temperature", "max_tokens", "max_completion_tokens", "seed", "top_k", "min_p"),
    *("top_logprobs", "repetition_penalty", "functions", "function_call", "reasoning_effort"),
    *("verbosity", "prediction", "audio", "web_search_options"),
    # vLLM's own
    *("chat_template", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "prompt_logprobs", "truncate_prompt_tokens", "thinking_token_budget"),
)
"""Those of which every value asks for something."""
ROLES = {"developer": "system"}
"""Roles of OpenAI's interface, and what chat templates call them."""
_said_once: set[str] = set()
"""Settings of requests that this process has said to leave out."""


class RequestError(Exception):
    """A request that is refused; the message is for the author of the agent."""


class ChatRequest(NamedTuple):
    """A request for a chat completion, without what the policy does not follow."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    left_out: list[str]
    """Settings that the policy does not follow."""


class Answered(NamedTuple):
    """A request that the policy has answered."""

    history: list[Message]
    """Its messages, and the answer."""
    tools: list[dict[str, Any]]
    key: str | None
    """Its Idempotency-Key."""
    turn: Written


class AgentConversation:
    """The conversations of one episode.

    Args:
        policy: Writes the turns.
        ignore: Settings of requests that are left out, and not refused.
        branches: Whether a request may continue another turn than the last one, or begin anew.
    """

    def __init__(self, policy: Policy, ignore: Collection[str], branches: bool = False) -> None:
        self._policy = policy
        self._ignore = ignore
        self._branches = branches
        self._answered: list[Answered] = []
        """By the number of the turn."""
        self._one_at_a_time = asyncio.Lock()

    @property
    def turns(self) -> int:
        """The turns that the agent has got."""
        return len(self._answered)

    async def answer(self, body: Any, *, again: bool = False, key: str | None = None) -> Written:
        """Returns a turn of the policy.

        Args:
            body: The JSON of a request.
            again: Whether the agent says that it sends this request once more.
            key: Its Idempotency-Key: a request is sent once more with the same one.

        Raises:
            RequestError: It is refused. The conversation stays as it was.
        """
        request = read_request(body, ignore=self._ignore)
        for name in sorted(set(request.left_out) - _said_once):
            _said_once.add(name)
            log.warning("Requests of the agent have %s, which is left out (Agent.ignore).", name)
        # A request that is sent again may come while the first one is still being answered.
        async with self._one_at_a_time:
            for one in reversed(self._answered):
                sent_before = again or (key is not None and key == one.key)
                if sent_before and _same(request.messages, one.history[:-1]):
                    return one.turn
            last = len(self._answered) - 1
            after = self._continued(request)
            if after != last and not self._branches:
                raise RequestError(
                    "it does not continue the last request: the tools and all messages that were "
                    "said, with the policy's answer, and at least one more that is no assistant's. "
                    "Without branches (Agent.branches) an episode is one such conversation"
                )
            begins = after == BEGINNING
            known = 0 if begins else len(self._answered[after].history)
            turn = await self._policy.turn(
                request.messages[known:],
                tools=request.tools if begins else (),
                after=None if after == last else after,
            )
            history = [*request.messages, turn_message(turn.content, turn.calls)]
            self._answered.append(Answered(history, request.tools, key, turn))
            return turn

    def _continued(self, request: ChatRequest) -> int:
        """Returns the number of the turn with the longest history that the request continues;
        `BEGINNING` if it continues none."""
        found, longest = BEGINNING, 0
        for number, one in enumerate(self._answered):
            known = len(one.history)
            added = request.messages[known:]
            if (
                added
                and known >= longest
                and request.tools == one.tools
                and _same(request.messages[:known], one.history)
                and not any(message["role"] == "assistant" for message in added)
            ):
                found, longest = number, known
        return found


def read_request(body: Any, *, ignore: Collection[str]) -> ChatRequest:
    """Returns a request.

    Args:
        body: The JSON of `POST /v1/chat/completions`.
        ignore: Settings that are left out, and not refused.

    Raises:
        RequestError: It asks for what the policy does not do, or cannot be read.
    """
    try:
        unfollowed = sorted(name for name in (*NEUTRAL, *NEVER_NEUTRAL) if _asks(body, name))
        messages = _messages(body["messages"])
        tools = body.get("tools") if body.get("tool_choice") != "none" else None
        for tool in tools or []:
            _check_name(tool["function"])
        (body.get("stream_options") or {}).get("include_usage")
    except (AttributeError, LookupError, TypeError) as error:
        raise RequestError(f"the body is no chat: {error!r}") from error
    if refused := [name for name in unfollowed if name not in ignore]:
        name = refused[0]
        raise RequestError(
            f"`{name}` is {body[name]!r:.80}, and the policy samples as the run does. Leave it out of "
            "the request, or name it in Agent.ignore to have it left out"
        )
    return ChatRequest(messages, tools or [], unfollowed)


def turn_message(content: str, calls: Collection[ToolCall]) -> Message:
    """Returns a turn of the policy as `read_request` returns it."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            called(call.id, call.name, parsed_arguments(call.arguments)) for call in calls
        ]
    return message


def called(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a call in a message."""
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
    return value is not None and value not in NEUTRAL.get(name, ())


def _messages(found: list[dict[str, Any]]) -> list[Message]:
    """Returns messages with texts as contents, and arguments of calls as mappings where they are
    JSON of one: chat templates show those."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    for one in found:
        role = ROLES.get(one["role"], one["role"])
        message: Message = {"role": role, "content": _text(one.get("content"))}
        if calls := one.get("tool_calls"):
            message["tool_calls"] = [_call(call) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if role == "tool":
            call_id = str(one.get("tool_call_id") or "")
            message["tool_call_id"] = call_id
            message["name"] = str(one.get("name") or names.get(call_id) or "tool")
        messages.append(message)
    if not messages:
        raise RequestError("`messages` is empty")
    return messages


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    _check_name(function)
    arguments = parsed_arguments(function.get("arguments"))
    return called(str(call.get("id") or ""), function["name"], arguments)


def _check_name(function: dict[str, Any]) -> None:
    if not isinstance(function["name"], str):
        raise TypeError(f"the name of a function is {function['name']!r}")


def _text(content: Any) -> str:
    """Returns a content as text; parts of other kinds are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if not isinstance(part.get("text"), str):
            raise RequestError(f"a part of type {part.get('type')!r}: the policy reads text")
    return "".join(part["text"] for part in content)
