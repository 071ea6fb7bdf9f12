"""An agent's requests are the observations of an episode, and nothing of them is obeyed that would
make false log-probs. Real clients, a real server; the policy's turns are written by the test."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lrl.environments import Agent, ToolCall, Written
from lrl.environments import agent as agent_of_lrl
from lrl.environments.agent_conversation import AgentConversation
from lrl.environments.agent_server import AgentAddress, AgentServer
from lrl.environments.chat_request import RequestError, read_request
from lrl.environments.play import Play, Reply
from lrl.errors import ConfigError
from tests.environments import agents

CALL = Written("<call>", [1, 2], [ToolCall("add", '{"a": 2, "b": 3}', "t0000c000")], "Let me see.")
ANSWER = Written("It is 5", [3], content="It is 5")
DEADLINE_S = 60.0


async def play(agent: Agent, turns: Sequence[Written], **row: Any) -> list[Reply]:
    """Plays an episode whose policy writes `turns`; returns the replies."""
    replies: asyncio.Queue[Reply] = asyncio.Queue()
    playing = Play(agent, replies.put_nowait)
    task = asyncio.ensure_future(playing.run("2+3=", row))
    got = []
    for turn in (*turns, None):
        next_reply = asyncio.ensure_future(replies.get())
        await asyncio.wait({next_reply, task}, return_when=asyncio.FIRST_COMPLETED)
        if not next_reply.done():
            next_reply.cancel()
            await task  # raises the error of the agent
        got.append(await next_reply)
        if turn is not None:
            playing.wrote(turn)
    return got


def played(agent: Agent, turns: Sequence[Written], **row: Any) -> list[Reply]:
    return asyncio.run(asyncio.wait_for(play(agent, turns, **row), DEADLINE_S))


def test_episodes_that_begin_at_once_share_the_server() -> None:
    async def both() -> list[list[Reply]]:
        agent = Agent(agents.adds)
        return await asyncio.gather(*(play(agent, [CALL, ANSWER]) for _ in range(3)))

    for replies in asyncio.run(asyncio.wait_for(both(), DEADLINE_S)):
        assert [one.done for one in replies] == [False, False, True]


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


PROGRAM = """
import asyncio, json, os, sys
from tests.environments.agents import adds
row = json.load(sys.stdin)
print("the agent begins")
asyncio.run(adds(**row, base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]))
print(json.dumps({"reward": row["worth"]}))
"""


def test_a_program_is_an_agent_with_the_reward_in_its_last_line() -> None:
    agent = Agent(command=[sys.executable, "-c", PROGRAM])
    replies = played(agent, [CALL, ANSWER], worth=0.25)
    assert [one.done for one in replies] == [False, False, True]
    assert replies[-1].reward == 0.25


def test_a_program_that_fails_is_named_with_its_last_words() -> None:
    agent = Agent(command=[sys.executable, "-c", "import sys; sys.exit('no such tool')"])
    with pytest.raises(RuntimeError, match="ended with status 1: no such tool"):
        played(agent, [])


def test_a_program_ends_with_its_episode(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def begin_and_end() -> None:
        playing = Play(Agent(command=[sys.executable, "-c", program]), lambda reply: None)
        task = asyncio.ensure_future(playing.run("go", {}))
        while not (note.exists() and note.read_text()):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(begin_and_end(), DEADLINE_S))
    pid = int(note.read_text())
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


async def begin_and_cancel(agent: Agent, reached: Callable[[], bool], **row: Any) -> None:
    """Ends an episode from outside, as rank 0 does at a limit, when it has reached a place."""
    replies: list[Reply] = []
    task = asyncio.ensure_future(Play(agent, replies.append).run("go", row))
    while not (replies or reached()):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_for_a_turn_learns_that_the_episode_has_ended(stream: bool) -> None:
    """Else its thread would go on, and end the process with the episodes of all others."""
    agents.ended.clear()

    async def end_while_it_waits() -> None:
        await begin_and_cancel(Agent(agents.asks_in_vain), lambda: False, stream=stream)
        await asyncio.to_thread(agents.ended.wait, DEADLINE_S)

    asyncio.run(asyncio.wait_for(end_while_it_waits(), 2 * DEADLINE_S))
    assert agents.ended.is_set()


def test_a_function_that_outlives_its_episode_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[int] = []

    async def begin() -> None:
        await begin_and_cancel(Agent(agents.continues_alone), agents.began.is_set)
        while not exits:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(agent_of_lrl.os, "_exit", exits.append)
    monkeypatch.setattr(agent_of_lrl, "THREAD_END_S", 0.1)
    try:
        asyncio.run(asyncio.wait_for(begin(), DEADLINE_S))
        assert exits == [1]
    finally:
        agents.stop.set()


@pytest.mark.parametrize(
    ("agent", "turns", "error", "said"),
    [
        (agents.changes_history, [ANSWER], agents.openai.BadRequestError, "not what was said"),
        (agents.asks_for_a_temperature, [], agents.openai.BadRequestError, "`temperature` is 0.2"),
        (agents.returns_text, [ANSWER], TypeError, "returned 'good': give a reward"),
    ],
)
def test_what_an_agent_does_wrong_is_said_to_its_author(
    agent: Any, turns: list[Written], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        played(Agent(agent, branches=False), turns)


def test_settings_that_are_named_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(agents.asks_for_a_temperature, ignore=["temperature"])
    assert played(agent, [ANSWER])[-1].done
    assert "Requests of the agent have temperature, which is left out" in caplog.text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "a function, `agent`, or a program, `command`: one"),
        ({"agent": agents.adds, "command": ["x"]}, "a function, `agent`, or a program"),
        ({"agent": "no.such:thing"}, "Agent.agent is 'no.such:thing'"),
        ({"agent": 3}, "Agent.agent is a int: give a function"),
        ({"command": "python agent.py"}, "Agent.command is 'python agent.py': give a list"),
        ({"command": []}, "Agent.command is []"),
        ({"agent": agents.adds, "ignore": ["colour"]}, "Agent.ignore has 'colour'"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Agent(**settings)
    assert said in str(refused.value)


USER = {"role": "user", "content": "go"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "the body is no chat"),
        ({}, "give `messages`, a list"),
        ({"messages": "go"}, "give `messages`, a list"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["go"]}, "messages[0] has no `role`"),
        ({"messages": [{"content": "go"}]}, "messages[0] has no `role`"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0] has a part of type 'int'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0] has a part of type 'image_url', and the policy reads text",
        ),
        ({"messages": [USER | {"tool_calls": 3}]}, "messages[0].tool_calls is no list"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "without a function's `name`"),
        ({"messages": [USER], "tools": 3}, "`tools` is no list"),
        ({"messages": [USER], "tools": [{}]}, "tools[0] is no function with a `name`"),
        ({"messages": [USER], "tools": ["add"]}, "tools[0] is no function with a `name`"),
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
            }.items()
        ),
    ],
)
def test_a_request_that_the_policy_does_not_follow_is_refused(body: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_request(body, ignore=())
    assert said in str(refused.value)
    if isinstance(body, dict) and said.endswith("` is"):
        (name,) = body.keys() - {"messages"}
        assert read_request(body, ignore=[name]).left_out == [name]


def test_what_asks_for_nothing_is_taken() -> None:
    neutral = {"n": 1, "top_p": 1.0, "tool_choice": "auto", "stop": None, "logprobs": False}
    assert read_request({"messages": [USER], **neutral}, ignore=()).left_out == []
    none = read_request(
        {"messages": [USER], "tools": [agents.ADD], "tool_choice": "none"}, ignore=()
    )
    assert none.tools == []


Ask = Callable[..., Awaitable[tuple[int, Any]]]


def serve(
    test: Callable[[AgentAddress, Ask, list[Any]], Awaitable[None]], branches: bool = False
) -> None:
    """Runs a test against a server with one episode; the list has what the policy was told."""

    async def work() -> None:
        told: list[Any] = []

        class Policy:
            async def turn(
                self,
                observation: Any,
                reward: float = 0.0,
                tools: Any = (),
                after: int | None = None,
            ) -> Written:
                told.append(observation if after is None else (after, observation, tools))
                return ANSWER

        server = AgentServer()
        await server.start()
        async with aiohttp.ClientSession() as session:

            async def ask(
                url: str, body: Any = None, key: str = "", **headers: str
            ) -> tuple[int, Any]:
                sent = {name.replace("_", "-"): value for name, value in headers.items()}
                sent["Authorization"] = f"Bearer {key}"
                method = "GET" if body is None else "POST"
                data = body if isinstance(body, str) else json.dumps(body)
                async with session.request(method, url, data=data, headers=sent) as answer:
                    return answer.status, await answer.json()

            conversation = AgentConversation(Policy(), (), branches)
            async with server.serving(conversation) as address:
                await test(address, ask, told)
            url = f"{address.base_url}/models"
            assert (await ask(url, key=address.api_key))[0] == 401, "it ends with the episode"

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def test_a_request_that_is_sent_again_is_one_turn() -> None:
    async def test(address: AgentAddress, ask: Ask, told: list[Any]) -> None:
        url, key = f"{address.base_url}/chat/completions", address.api_key
        body = {"messages": [USER]}
        first = await ask(url, body, key, Idempotency_Key="abc")
        for headers in ({"x_stainless_retry_count": "1"}, {"Idempotency_Key": "abc"}):
            status, again = await ask(url, body, key, **headers)
            assert status == 200 and again["choices"] == first[1]["choices"]
        assert told == [[USER]]
        status, refused = await ask(url, body, key)
        assert status == 400 and "adds no message" in refused["error"]["message"]

    serve(test)


def test_a_refused_request_leaves_the_conversation_as_it_was() -> None:
    async def test(address: AgentAddress, ask: Ask, told: list[Any]) -> None:
        url, key = f"{address.base_url}/chat/completions", address.api_key
        await ask(url, {"messages": [USER]}, key)
        said = {"role": "assistant", "content": ANSWER.content}
        own = {"role": "assistant", "content": "I say so"}
        history = [USER, said, USER]
        for body, why in (
            ("{", "no JSON"),
            ({"messages": [USER, own, USER]}, "messages[1], of the role 'assistant', is not what"),
            ({"messages": [USER, said, own]}, "an assistant message that the policy has not"),
            ({"messages": history, "tools": [agents.ADD]}, "the tools are others"),
            ({"messages": history, "stream": True, "n": 3}, "`n` is 3"),
        ):
            status, answer = await ask(url, body, key)
            assert status == 400 and why in answer["error"]["message"]
        assert len(told) == 1
        assert (await ask(url, {"messages": history}, key))[0] == 200
        assert told[1] == [USER]

    serve(test)


def test_a_request_continues_the_longest_history_that_says_the_same_and_else_begins_anew() -> None:
    async def test(address: AgentAddress, ask: Ask, told: list[Any]) -> None:
        url, key = f"{address.base_url}/chat/completions", address.api_key
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
        status, refused = await ask(url, {"messages": [USER], "n": 2}, key)
        assert status == 400 and "send the request as often" in refused["error"]["message"]

    serve(test, branches=True)


def test_nobody_without_the_key_of_an_episode_speaks_with_the_policy() -> None:
    async def test(address: AgentAddress, ask: Ask, told: list[Any]) -> None:
        key, root = address.api_key, address.base_url.partition(address.api_key)[0]
        other = "0" * len(key)
        for path in ("chat/completions", "models"):
            body = {"messages": [USER]} if path != "models" else None
            assert (await ask(f"{address.base_url}/{path}", body, other))[0] == 401
            assert (await ask(f"{address.base_url}/{path}", body))[0] == 401
            assert (await ask(f"{root}{other}/v1/{path}", body, other))[0] == 401
        status, answer = await ask(f"{address.base_url}/responses", {}, key)
        assert status == 404
        assert (
            "POST /v1/responses is not served; an agent is: POST /v1/chat/completions"
            in (answer["error"]["message"])
        )
        status, models = await ask(f"{address.base_url}/models", None, key)
        assert status == 200 and [one["id"] for one in models["data"]] == ["policy"]
        assert not told

    serve(test)


def test_no_route_answers_a_wrong_caller() -> None:
    async def work() -> None:
        read: list[Any] = []

        class Policy:
            async def turn(self, observation: Any, *more: Any, **how: Any) -> Written:
                read.append(observation)
                return ANSWER

        server = AgentServer()
        await server.start()
        async with (
            aiohttp.ClientSession() as session,
            server.serving(AgentConversation(Policy(), (), True)) as mine,
            server.serving(AgentConversation(Policy(), (), True)) as other,
        ):
            async with server.serving(AgentConversation(Policy(), (), True)) as ended:
                pass

            async def status(method: str, url: str, headers: dict[str, str]) -> int:
                async with session.request(
                    method, url, json={"messages": [USER]}, headers=headers
                ) as answer:
                    assert ANSWER.content not in await answer.text()
                    return answer.status

            wrong = {
                "no key": (mine, {}),
                "an empty one": (mine, {"Authorization": "Bearer "}),
                "of another episode": (mine, {"Authorization": f"Bearer {other.api_key}"}),
                "at another address": (other, {"Authorization": f"Bearer {mine.api_key}"}),
                "of an ended episode": (ended, {"Authorization": f"Bearer {ended.api_key}"}),
                "as a password": (mine, {"Authorization": f"Basic {mine.api_key}"}),
                "in another header": (mine, {"X-API-Key": mine.api_key}),
            }
            for why, (address, headers) in wrong.items():
                for method, route, answered in (
                    ("POST", "/chat/completions", 401),
                    ("GET", "/models", 401),
                    ("GET", "/chat/completions", 404),
                    ("POST", "/completions", 404),
                    ("DELETE", "/models", 404),
                ):
                    found = await status(method, address.base_url + route, headers)
                    assert found == answered, (why, route)
        assert not read

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
