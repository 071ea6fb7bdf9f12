"""The parse of calls of tools: its request, and generators that fail at it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any
from unittest.mock import AsyncMock

import pytest

from lrl.environments import ToolCall
from lrl.errors import EpisodeError, GeneratorError, GeneratorTimeout, RequestRejected
from lrl.generators.pool import GeneratorPool
from lrl.generators.tool_calls import ROUTE, ToolCallParser
from tests.environments.agents import ADD
from tests.generators.model_fleet import make_pool

CALL = {"id": "random", "function": {"name": "add", "arguments": "{}"}}
ANSWER = {"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}


def pool_of(*answers: Any) -> tuple[GeneratorPool, list[AsyncMock]]:
    """A pool, and the calls of each generator, which answers, or fails."""
    pool, clients = make_pool(*(8 for _ in answers))
    for client, answer in zip(clients, answers, strict=True):
        client.post = AsyncMock(side_effect=itertools.repeat(answer))
    return pool, [client.post for client in clients]


def find(pool: GeneratorPool, token_ids: list[int]) -> list[ToolCall]:
    return list(asyncio.run(ToolCallParser(pool, {2})(token_ids, 3, [ADD]))[1])


def test_a_turn_is_parsed_without_its_end_and_its_calls_have_the_same_ids_at_each_play() -> None:
    pool, (post,) = pool_of(ANSWER)
    assert find(pool, [7, 8, 2]) == [ToolCall("add", "{}", "t0003c000")]
    route, body = post.await_args.args
    assert route == ROUTE and body["chat_request"]["tools"] == [ADD]
    assert body["generate_response"]["choices"][0]["token_ids"] == [7, 8]
    assert find(pool, [2]) == find(pool, []) == [] and post.await_count == 1
    assert find(pool, [2, 7])
    _, body = post.await_args.args
    assert body["generate_response"]["choices"][0]["token_ids"] == [2, 7]


def test_a_second_generator_parses_if_the_first_one_fails() -> None:
    pool, (lost, other) = pool_of(GeneratorError("it is gone"), ANSWER)
    evicted = pool.generators[0]
    assert len(find(pool, [7])) == 1
    assert lost.await_count == other.await_count == 1
    assert evicted.eviction == "it is gone" and evicted not in pool.generators


@pytest.mark.parametrize(
    "answer",
    [
        RequestRejected("answered 400"),
        GeneratorTimeout("no answer within 60 s"),
        {"choices": []},
        {"choices": [{"message": {"tool_calls": [{}]}}]},
        [],
    ],
)
def test_a_turn_that_is_not_parsed_fails_the_episode_and_evicts_nobody(answer: Any) -> None:
    pool, _ = pool_of(answer, ANSWER)
    with pytest.raises(EpisodeError, match="environment_error: the turn is not parsed: "):
        find(pool, [7])
    assert len(pool.generators) == 2
