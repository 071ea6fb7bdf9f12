"""A request of an agent for a chat completion: what of it the policy can do, in messages that chat
templates know.

The policy samples by the run's settings, and the trainer computes log-probs of that distribution.
So what would change the distribution is refused, or left out and said so; it is never obeyed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lrl.environments.base import Message, ToolCall

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
    "temperature",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "top_k",
    "min_p",
    "top_logprobs",
    "repetition_penalty",
    "functions",
    "function_call",
    "reasoning_effort",
    "verbosity",
    "prediction",
    "audio",
    "web_search_options",
    # vLLM's own
    "chat_template",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "thinking_token_budget",
)
"""Those of which every value asks for something."""
REMEDIES = {
    "n": "send the request as often: each answer is a branch",
    "temperature": "data.temperature is the run's",
    "max_tokens": "data.max_turn_tokens is the run's",
    "max_completion_tokens": "data.max_turn_tokens is the run's",
    "functions": "give `tools`",
    "function_call": "give `tools`",
    "parallel_tool_calls": "a turn may have several calls",
    "chat_template": "the chat template is the policy's",
    "chat_template_kwargs": "a column of the data set has them, and no agent",
}
ROLES = {"developer": "system"}
"""Roles of OpenAI's interface, and what chat templates call them."""


class RequestError(Exception):
    """A request that is refused; the message is for the author of the agent."""


@dataclass(frozen=True)
class ChatRequest:
    """A request for a chat completion, without what the policy does not follow."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    left_out: list[str]
    """Settings that the policy does not follow."""


def read_request(body: Any, *, ignore: Collection[str]) -> ChatRequest:
    """Returns a request.

    Args:
        body: The JSON of `POST /v1/chat/completions`.
        ignore: Settings that are left out, and not refused.

    Raises:
        RequestError: It asks for what the policy does not do, or cannot be read.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise RequestError("the body is no chat: give `messages`, a list")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RequestError("`stream_options` is no object")
    unfollowed = sorted(filter(lambda name: _asks(body, name), (*NEUTRAL, *NEVER_NEUTRAL)))
    if refused := [name for name in unfollowed if name not in ignore]:
        name = refused[0]
        why = REMEDIES.get(name, "the log-probs would be those of another distribution")
        raise RequestError(
            f"`{name}` is {body[name]!r:.80}, and the policy samples as the run does ({why}). Leave "
            f"it out of the request, or name it in Agent.ignore to have it left out"
        )
    tools = body.get("tools") or []
    if body.get("tool_choice") == "none":
        tools = []
    return ChatRequest(read_messages(body["messages"]), read_tools(tools), unfollowed)


def read_messages(found: list[Any]) -> list[Message]:
    """Returns messages with texts as contents; raises RequestError for others."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    for number, one in enumerate(found):
        where = f"messages[{number}]"
        if not isinstance(one, dict) or not isinstance(one.get("role"), str):
            raise RequestError(f"{where} has no `role`")
        role = ROLES.get(one["role"], one["role"])
        message: Message = {"role": role, "content": _text(one.get("content"), where)}
        if found_calls := one.get("tool_calls"):
            calls = read_calls(found_calls, where)
            message["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
        if role == "tool":
            call_id = str(one.get("tool_call_id") or "")
            message["tool_call_id"] = call_id
            message["name"] = str(one.get("name") or names.get(call_id) or "tool")
        messages.append(message)
    if not messages:
        raise RequestError("`messages` is empty")
    return messages


def read_tools(found: Any) -> list[dict[str, Any]]:
    """Returns schemas of tools; raises RequestError for what is none."""
    if not isinstance(found, list):
        raise RequestError("`tools` is no list")
    for number, tool in enumerate(found):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{number}] is no function with a `name`")
    return found


def read_calls(found: Any, where: str) -> list[dict[str, Any]]:
    """Returns the calls of a message, with arguments as a mapping where they are JSON of one: chat
    templates show those."""
    calls = []
    for call in found if isinstance(found, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.tool_calls has one without a function's `name`")
        arguments = parsed_arguments(function.get("arguments"))
        called = {"name": function["name"], "arguments": arguments}
        calls.append({"id": str(call.get("id") or ""), "type": "function", "function": called})
    if not calls:
        raise RequestError(f"{where}.tool_calls is no list of calls")
    return calls


def turn_message(content: str, calls: Collection[ToolCall]) -> Message:
    """Returns a turn of the policy as `read_messages` returns it."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": parsed_arguments(call.arguments)},
            }
            for call in calls
        ]
    return message


def parsed_arguments(arguments: Any) -> Any:
    """Returns the arguments of a call as a mapping, or as they are if they are no JSON of one."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):  # a policy writes any number of brackets
        return arguments
    return found if isinstance(found, dict) else arguments


def says_the_same(one: Message, other: Message) -> bool:
    """Whether two messages differ by nothing but outer white space of the text, and the spelling of
    a call's arguments: agents send the policy's turns back with others."""
    return _said(one) == _said(other)


def _said(message: Message) -> tuple[Any, ...]:
    return (
        message["role"],
        message["content"].strip(),
        message.get("tool_calls") or [],
        message.get("tool_call_id"),
    )


def _asks(body: Mapping[str, Any], name: str) -> bool:
    """Whether a request asks for something by this setting."""
    value = body.get(name)
    if name == "tool_choice" and value == "none":  # the tools are not shown then
        return False
    return value is not None and value not in NEUTRAL.get(name, ())


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"{where} has a part of type {kind!r}, and the policy reads text")
        texts.append(part["text"])
    return "".join(texts)
