"""An agent's requests are the observations of an episode, and nothing of them is obeyed that would
make false log-probs. Real clients, a real server; the policy's turns are written by the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from lrl.environments import Agent, ToolCall, Written
from lrl.environments import agent as agent_of_lrl
from lrl.environments.play import Reply
from lrl.types import Prompt
from tests.environments import agents
from tests.environments.here import Here

CALL = Written("<call>", [1, 2], [ToolCall("add", '{"a": 2, "b": 3}', "t0000c000")], "Let me see.")
ANSWER = Written("It is 5", [3], content="It is 5")
DEADLINE_S = 60.0


def played(
    agent: Agent, turns: Iterable[Written], told: list[Reply] | None = None, **row: Any
) -> list[Reply]:
    """Plays an episode of these turns; returns what the policy was told, and adds it to `told`."""
    replies: list[Reply] = [] if told is None else told

    async def play() -> None:
        episode = Here(agent).open(Prompt(id=0, token_ids=[], text="2+3=", columns=row))
        replies.append(await episode.begin())
        for turn in turns:
            if replies[-1].done:
                break
            replies.append(await episode.reply(turn))

    asyncio.run(asyncio.wait_for(play(), DEADLINE_S))
    return replies


def test_a_request_is_an_observation_and_its_answer_a_turn() -> None:
    opening, result, end = played(Agent(agents.adds), [CALL, ANSWER], reward=0.5)
    assert opening == Reply([{"role": "user", "content": "2+3="}], tools=(agents.ADD,))
    assert result.observation == [
        {"role": "tool", "content": "5", "tool_call_id": "t0000c000", "name": "add"}
    ]
    assert not result.tools
    assert end == Reply("", True, 0.5)


def test_a_plain_function_and_a_stream_are_answered_too() -> None:
    opening, more, end = played(Agent("tests.environments.agents:streams"), [ANSWER, ANSWER])
    assert opening.observation == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+3="},
    ]
    assert more.observation == [{"role": "user", "content": "It is 5, 1 tokens"}]
    assert end == Reply("", True, 0.0)


def test_a_function_that_outlives_its_episode_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[int] = []
    began, stop = threading.Event(), threading.Event()

    def continues_alone(**columns: Any) -> None:
        began.set()
        stop.wait()

    async def begin_and_cancel() -> None:
        episode = Here(Agent(continues_alone)).open(Prompt(id=0, token_ids=[], text="go"))
        while not began.is_set():
            await asyncio.sleep(0.01)
        episode.close()  # as a `Player` does
        while not exits:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(agent_of_lrl.os, "_exit", exits.append)
    monkeypatch.setattr(agent_of_lrl, "THREAD_END_S", 0.1)
    try:
        asyncio.run(asyncio.wait_for(begin_and_cancel(), DEADLINE_S))
        assert exits == [1]
    finally:
        stop.set()
