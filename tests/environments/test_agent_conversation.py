"""What of a request of OpenAI's interface the policy does, and that all else is refused."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from lrl.environments.agent_conversation import read_request
from tests.environments import agents

USER = {"role": "user", "content": "go"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "the body is no chat"),
        ({}, "the body is no chat"),
        ({"messages": "go"}, "the body is no chat"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["go"]}, "the body is no chat"),
        ({"messages": [{"content": "go"}]}, "the body is no chat"),
        ({"messages": [{"role": "user", "content": 3}]}, "the body is no chat"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text"),
        ({"messages": [USER | {"tool_calls": 3}]}, "the body is no chat"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "the body is no chat"),
        ({"messages": [USER], "tools": 3}, "the body is no chat"),
        ({"messages": [USER], "tools": [{}]}, "the body is no chat"),
        ({"messages": [USER], "tools": [{"function": {"name": 3}}]}, "the body is no chat"),
        ({"messages": [USER], "tools": ["add"]}, "the body is no chat"),
        *(
            ({"messages": [USER], name: value}, f"`{name}` is")
            for name, value in {
                "n": 2,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
                "frequency_penalty": 0.5,
                "presence_penalty": 0.5,
                "logit_bias": {"7": 1},
                "logprobs": True,
                "stop": ["\n"],
                "top_p": 0.9,
                "temperature": 1,
                "max_tokens": 5,
                "max_completion_tokens": 5,
                "seed": 1,
                "top_k": 5,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
                "functions": [],
                "parallel_tool_calls": False,
                "modalities": ["text", "audio"],
                "best_of": 2,
                "min_tokens": 5,
                "stop_token_ids": [7],
                "continue_final_message": True,
                "chat_template_kwargs": {"enable_thinking": False},
                "reasoning_effort": "low",
                "structured_outputs": {"choice": ["yes", "no"]},
                "guided_json": {},
                "prompt_logprobs": 0,
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
