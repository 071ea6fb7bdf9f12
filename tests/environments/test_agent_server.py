"""The interface that an agent takes for a model: which requests are one turn, and who may send them.
Real requests, a real server; the policy's turns are written by the test.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lrl.environments import Agent, ToolCall, Written
from lrl.environments.agent_server import read_request
from lrl.environments.play import Reply
from tests.environments.agents import ADD, ask
from tests.environments.test_agent import ANSWER, played

USER = {"role": "user", "content": "go"}
Ask = Callable[..., Awaitable[tuple[int, Any]]]
"""Sends a body; returns the status and the JSON of the answer."""


def serve(
    test: Callable[[Ask, list[Reply]], Awaitable[None]],
    branches: bool = False,
    turn: Written = ANSWER,
) -> None:
    """Runs a test as the agent of an episode, of which each turn is `turn`; the list has what the
    policy was told."""
    told: list[Reply] = []

    async def agent(*, base_url: str, api_key: str, **row: Any) -> None:
        async with aiohttp.ClientSession() as session:

            async def say(
                body: Any, path: str = "/chat/completions", **headers: str
            ) -> tuple[int, Any]:
                return await ask(session, f"{base_url}{path}", api_key, body, **headers)

            await test(say, told)

    played(Agent(agent, branches=branches), itertools.repeat(turn), told)


def test_a_call_with_more_brackets_than_can_be_read_is_a_turn_all_the_same() -> None:
    call = ToolCall("add", '{"a":' * 3000, "t0000c000")

    async def test(say: Ask, told: list[Reply]) -> None:
        status, answer = await say({"messages": [USER]})
        assert status == 200
        message = answer["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == call.arguments
        assert (await say({"messages": [USER, message, USER]}))[0] == 200
        assert told == [Reply([USER])] * 2, "it continues the conversation"

    serve(test, branches=True, turn=Written("x", [1], (call,), "x"))


def test_a_refused_request_leaves_the_conversation_as_it_was() -> None:
    async def test(say: Ask, told: list[Reply]) -> None:
        await say({"messages": [USER]})
        said = {"role": "assistant", "content": ANSWER.content}
        own = {"role": "assistant", "content": "I say so"}
        history = [USER, said, USER]
        for body, why in (
            ("[" * 5000, "no JSON"),
            ({"messages": [USER]}, "it does not continue"),
            ({"messages": history, "stream": True, "stream_options": True}, "no attribute 'get'"),
            ({"messages": [USER, own, USER]}, "it does not continue"),
            ({"messages": [USER, said, own]}, "it does not continue"),
            ({"messages": history, "tools": [ADD]}, "it does not continue"),
            ({"messages": history, "stream": True, "n": 3}, "`n` is 3"),
        ):
            status, answer = await say(body)
            assert status == 400 and why in answer["error"]["message"]
        for route in ("/end", "/../../episodes"):
            assert (await say({"reward": 1}, route))[0] == 404, "only agents elsewhere do that"
        assert len(told) == 1
        assert (await say({"messages": history}))[0] == 200
        assert told[1] == Reply([USER])

    serve(test)


def test_a_request_continues_the_longest_history_that_says_the_same_and_else_begins_anew() -> None:
    async def test(say: Ask, told: list[Reply]) -> None:
        other = {"role": "user", "content": "stay"}
        spaced = {"role": "assistant", "content": f" {ANSWER.content}\n"}
        forged = {"role": "assistant", "content": "It is 6"}
        system = {"role": "system", "content": "Be brief."}
        asked = [
            ([USER], [], Reply([USER])),
            ([USER, spaced, USER], [], Reply([USER])),
            ([USER, spaced, other], [], Reply([other], after=0)),
            ([USER, spaced, USER, spaced, other], [], Reply([other], after=1)),
            ([USER], [], Reply([USER], after=-1)),
            ([USER, forged, other], [], Reply([USER, forged, other], after=-1)),
            ([system, USER], [], Reply([system, USER], after=-1)),
            ([USER, spaced, other], [ADD], Reply([USER, spaced, other], tools=(ADD,), after=-1)),
            ([USER, spaced, other, spaced, USER], [ADD], Reply([USER])),
            ([USER, spaced, other, spaced, USER], [], Reply([USER], after=2)),
        ]
        for messages, given, expected in asked:
            assert (await say({"messages": messages, "tools": given}))[0] == 200
            assert told[-1] == expected
        assert len(told) == len(asked)
        retried = {"x-stainless-retry-count": "2"}
        assert (await say({"messages": [system, USER]}, **retried))[0] == 200
        assert len(told) == len(asked), "a request that is sent again is no branch"

    serve(test, branches=True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "the body is no chat"),
        ({}, "the body is no chat"),
        ({"messages": "go"}, "the body is no chat"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": [{"content": "go"}]}, "the body is no chat"),
        ({"messages": [{"role": "user", "content": 3}]}, "the body is no chat"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "the body is no chat"),
        ({"messages": [USER], "tools": [{}]}, "the body is no chat"),
        ({"messages": [USER], "tools": [{"function": {"name": 3}}]}, "the body is no chat"),
        *(
            ({"messages": [USER], name: value}, f"`{name}` is")
            for name, value in {
                **{"n": 2, "tool_choice": "required", "response_format": {"type": "json_object"}},
                **{"temperature": 1, "top_p": 0.9, "stop": ["\n"], "logit_bias": {"7": 1}},
                **{"logprobs": True, "parallel_tool_calls": False, "max_tokens": 5, "seed": 0},
            }.items()
        ),
    ],
)
def test_a_request_that_the_policy_does_not_follow_is_refused(body: Any, said: str) -> None:
    with pytest.raises(web.HTTPBadRequest) as refused:
        read_request(body, ignore=())
    assert said in str(refused.value.text)
    if isinstance(body, dict) and said.endswith("` is"):
        (name,) = body.keys() - {"messages"}
        assert read_request(body, ignore=[name]) == ([USER], [])


def test_what_asks_for_nothing_is_taken() -> None:
    neutral = {"n": 1, "top_p": 1.0, "tool_choice": "auto", "stop": None, "logprobs": False}
    neutral |= {"parallel_tool_calls": True, "min_tokens": 0, "chat_template_kwargs": {}}
    neutral |= {"tools": [ADD]}
    assert read_request({"messages": [USER], **neutral}, ignore=()) == ([USER], [ADD])
    none = {"messages": [USER], "tools": [ADD], "tool_choice": "none"}
    assert read_request(none, ignore=()) == ([USER], [])
