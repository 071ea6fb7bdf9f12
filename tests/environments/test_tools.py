"""Tools: what the policy does wrong it can read, and what the machine does is a failure."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from lrl.environments import ToolCall, Tools, Written
from lrl.environments.play import Play, Reply
from tests.environments import tool_functions as made

ALL = Tools([made.add, made.slow, made.python], max_result_characters=60)


def call(name: str, arguments: str | dict[str, Any] = "", number: int = 0) -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(name, text, f"t0000c{number:03d}")


def replies(*turns: list[ToolCall]) -> list[Reply]:
    found: list[Reply] = []

    async def played() -> None:
        play = Play(ALL, found.append)
        work = asyncio.ensure_future(play.run("go", {"answer": 5}))
        for turn in (*turns, []):
            play.wrote(Written("", [], turn))
        await work

    asyncio.run(played())
    opening, *results, last = found
    assert opening == Reply() and last == Reply("", True, 0.0)
    return results


def result(name: str, arguments: str | dict[str, Any] = "") -> str:
    (reply,) = replies([call(name, arguments)])
    (message,) = reply.observation
    content = message.pop("content")
    assert message == {"role": "tool", "name": name, "tool_call_id": "t0000c000"}
    assert isinstance(content, str) and len(content) <= 500 and content.encode()
    return content


def value_of(expression: str) -> str:
    return result("python", {"expression": expression})


def test_a_turn_without_a_call_ends_the_episode_and_each_call_has_its_result() -> None:
    assert replies() == []
    assert result("add", {"a": 2, "b": 3}) == "5"
    assert value_of("{'дом': [1.5]}") == '{"дом": [1.5]}', "and no \\u0434"
    assert value_of("None") == "null"
    first, second = replies([call("add", {"a": 1, "b": 1})], [call("add", {"a": 1, "b": 2})])
    assert [first.observation[0]["content"], second.observation[0]["content"]] == ["2", "3"]  # type: ignore[index]


def test_all_calls_of_a_turn_run_the_async_ones_at_the_same_time() -> None:
    made.STARTED.clear()
    names = ("x", "y", "z")
    calls = [call("slow", {"name": name}, number) for number, name in enumerate(names)]
    (reply,) = replies([*calls, call("add", {"a": 1, "b": 2}, 3)])
    messages: Any = reply.observation
    assert [message["content"] for message in messages] == ["x", "y", "z", "3"]
    assert [message["tool_call_id"][-1] for message in messages] == list("0123")
    assert [line.endswith("begins") for line in made.STARTED] == [True] * 3 + [False] * 3


WRONG: list[tuple[str, Any, str]] = [
    ("ad", {}, "error: there is no tool 'ad'; there are add, slow, python"),
    ("x" * 999, {}, "error: there is no tool 'xxx"),
    ("add", '{"a": 2, "b"', "error: JSONDecodeError: Expecting ':'"),
    ("add", "[" * 99_999, "error: RecursionError: "),
    ("add", "[2, 3]", "error: TypeError: the arguments are no JSON object"),
    ("add", "", "error: TypeError: add() missing 2 required positional arguments: 'a' and 'b'"),
    ("add", {"a": 2, "b": 3, "c": 4}, "error: TypeError: add() got an unexpected keyword"),
    ("add", {"a": 2, "b": "дом"}, "error: TypeError: unsupported operand"),
    ("python", {"expression": "open('x' * 5000)"}, "error: OSError: [Errno 36] File name too long"),
    ("python", {"expression": "sys.exit(3)"}, "error: SystemExit: 3"),
    ("python", {"expression": r"'\ud800'"}, r"\ud800"),
    ("python", {"expression": "object()"}, '"<object object at'),
]


@pytest.mark.parametrize(("name", "arguments", "begin"), WRONG)
def test_what_the_policy_does_wrong_it_can_read(name: str, arguments: Any, begin: str) -> None:
    assert result(name, arguments).startswith(begin)


def test_a_long_result_is_cut_and_says_so() -> None:
    text = value_of("'word ' * 999")
    assert text == f"{'word ' * 12}\n[cut: the first 60 of 4995 characters]"


def test_what_the_machine_does_is_a_failure_and_no_result() -> None:
    with pytest.raises(MemoryError):
        value_of("bytearray(2**62)")
