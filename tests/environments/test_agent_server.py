"""The interface that an agent takes for a model: which requests are one turn, and who may send them.
Real requests, a real server; the policy's turns are written by the test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lrl.environments import ToolCall, Written
from lrl.environments.agent_server import (
    AgentConversation,
    address_of,
    read_request,
    server_of_this_process,
)
from tests.environments import agents
from tests.environments.test_agent import ANSWER, DEADLINE_S

USER = {"role": "user", "content": "go"}
Address = dict[str, str]
Ask = Callable[..., Awaitable[tuple[int, Any]]]


def serve(
    test: Callable[[Address, Ask, list[Any]], Awaitable[None]],
    branches: bool = False,
    turn: Written = ANSWER,
) -> None:
    """Runs a test against a server with one episode, of which each turn is `turn`; the list has what
    the policy was told."""

    async def work() -> None:
        told: list[Any] = []

        class Policy:
            async def turn(self, observation: Any, tools: Any, after: int | None) -> Written:
                told.append(observation if after is None else (after, observation, tools))
                return turn

        server = server_of_this_process()
        async with aiohttp.ClientSession() as session:

            async def ask(
                url: str, body: Any = None, key: str = "", **headers: str
            ) -> tuple[int, Any]:
                sent = {name.replace("_", "-"): value for name, value in headers.items()}
                sent["Authorization"] = f"Bearer {key}"
                method = "GET" if body is None else "POST"
                data = body if isinstance(body, str) else json.dumps(body)
                async with session.request(method, url, data=data, headers=sent) as answer:
                    has_json = answer.content_type == "application/json"
                    return answer.status, await answer.json() if has_json else None

            conversation = AgentConversation(Policy(), (), branches)
            server.playing[conversation.key] = conversation
            address = address_of(server.url, conversation.key)
            await test(address, ask, told)
            server.end(conversation.key)
            url = f"{address['base_url']}/models"
            assert (await ask(url, key=address["api_key"]))[0] == 410, "it ends with the episode"

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_a_call_with_more_brackets_than_can_be_read_is_a_turn_all_the_same() -> None:
    call = ToolCall("add", '{"a":' * 3000, "t0000c000")

    async def test(address: Address, ask: Ask, told: list[Any]) -> None:
        url, key = f"{address['base_url']}/chat/completions", address["api_key"]
        status, answer = await ask(url, {"messages": [USER]}, key)
        assert status == 200
        message = answer["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == call.arguments
        assert (await ask(url, {"messages": [USER, message, USER]}, key))[0] == 200
        assert told == [[USER], [USER]], "it continues the conversation"

    serve(test, branches=True, turn=Written("x", [1], (call,), "x"))


def test_a_refused_request_leaves_the_conversation_as_it_was() -> None:
    async def test(address: Address, ask: Ask, told: list[Any]) -> None:
        url, key = f"{address['base_url']}/chat/completions", address["api_key"]
        await ask(url, {"messages": [USER]}, key)
        said = {"role": "assistant", "content": ANSWER.content}
        own = {"role": "assistant", "content": "I say so"}
        history = [USER, said, USER]
        for body, why in (
            ("[" * 5000, "no JSON"),
            ({"messages": [USER]}, "it does not continue"),
            ({"messages": history, "stream": True, "stream_options": True}, "no attribute 'get'"),
            ({"messages": [USER, own, USER]}, "it does not continue"),
            ({"messages": [USER, said, own]}, "it does not continue"),
            ({"messages": history, "tools": [agents.ADD]}, "it does not continue"),
            ({"messages": history, "stream": True, "n": 3}, "`n` is 3"),
        ):
            status, answer = await ask(url, body, key)
            assert status == 400 and why in answer["error"]["message"]
        assert len(told) == 1
        assert (await ask(url, {"messages": history}, key))[0] == 200
        assert told[1] == [USER]

    serve(test)


def test_a_request_continues_the_longest_history_that_says_the_same_and_else_begins_anew() -> None:
    async def test(address: Address, ask: Ask, told: list[Any]) -> None:
        url, key = f"{address['base_url']}/chat/completions", address["api_key"]
        other = {"role": "user", "content": "stay"}
        spaced = {"role": "assistant", "content": f" {ANSWER.content}\n"}
        forged = {"role": "assistant", "content": "It is 6"}
        system = {"role": "system", "content": "Be brief."}
        asked = [
            ([USER], (), [USER]),
            ([USER, spaced, USER], (), [USER]),
            ([USER, spaced, other], (), (0, [other], ())),
            ([USER, spaced, USER, spaced, other], (), (1, [other], ())),
            ([USER], (), (-1, [USER], [])),
            ([USER, forged, other], (), (-1, [USER, forged, other], [])),
            ([system, USER], (), (-1, [system, USER], [])),
            ([USER, spaced, other], [agents.ADD], (-1, [USER, spaced, other], [agents.ADD])),
            ([USER, spaced, other, spaced, USER], [agents.ADD], [USER]),
            ([USER, spaced, other, spaced, USER], (), (2, [USER], ())),
        ]
        for messages, tools, expected in asked:
            body = {"messages": messages, "tools": list(tools)}
            assert (await ask(url, body, key))[0] == 200
            assert told[-1] == expected
        assert len(told) == len(asked)
        again = await ask(url, {"messages": [system, USER]}, key, x_stainless_retry_count="2")
        assert again[0] == 200
        assert len(told) == len(asked), "a request that is sent again is no branch"

    serve(test, branches=True)


def test_an_agent_of_this_process_takes_and_ends_no_episode() -> None:
    async def test(address: Address, ask: Ask, told: list[Any]) -> None:
        key, url = address["api_key"], address["base_url"]
        root = url.partition(f"/{key}")[0]
        for route in (f"{root}/episodes", f"{url}/end"):
            assert (await ask(route, {"reward": 1}, key))[0] == 404

    serve(test)


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
    neutral |= {"tools": [agents.ADD]}
    assert read_request({"messages": [USER], **neutral}, ignore=()) == ([USER], [agents.ADD])
    none = {"messages": [USER], "tools": [agents.ADD], "tool_choice": "none"}
    assert read_request(none, ignore=()) == ([USER], [])
