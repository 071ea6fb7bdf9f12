"""Lengths that a benchmark draws in the policy's place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.forced_lengths import equal, forced, long_tailed
from lrl.generators import generator
from lrl.generators.frames import Part, pack
from lrl.types import Rollout, Sampling

HOW = {"version": lambda: 0, "priority": 107, "deadline_s": 5.0}


@asynccontextmanager
async def obeying() -> AsyncIterator[tuple[generator.GeneratorClient, list[dict[str, Any]]]]:
    """A client of a server that writes as many tokens as it may, if it may write past the
    end token; and the `sampling_params` of all requests."""
    asked: list[dict[str, Any]] = []

    async def obey(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["sampling_params"])
        tokens = (
            asked[-1]["max_tokens"]
            if asked[-1]["ignore_eos"] and not asked[-1]["stop_token_ids"]
            else 1
        )
        response = web.StreamResponse()
        await response.prepare(request)
        written = [5] * tokens, [-1.0] * tokens, "length", [("0", 0, tokens)]
        await response.write(pack([Part(number, *written) for number in range(asked[-1]["n"])]))
        return response

    app = web.Application()
    app.router.add_post("/{path:.*}", obey)
    async with TestServer(app) as server:
        client = generator.GeneratorClient(
            f"http://127.0.0.1:{server.port}", "generator 0", "secret"
        )
        yield client, asked
        await client.close()


def test_each_response_of_a_group_has_its_drawn_length_even_if_another_generator_continues_it() -> (
    None
):
    lengths, rollouts = long_tailed(), [Rollout() for _ in range(4)]
    cut, longest = 3, max(lengths.of(7, 107, 4))

    async def scene() -> None:
        async with obeying() as (client, _):
            await client.write([1, 2], rollouts, Sampling(n=4, max_tokens=longest), **HOW)
            one = rollouts[2]
            one.finish_reason = ""
            del one.token_ids[cut:], one.logprobs[cut:], one.versions[cut:]
            await client.write([1, 2], [one], Sampling(n=4, max_tokens=longest), **HOW)

    with forced(lengths, prompts=100):
        asyncio.run(scene())
    drawn = lengths.of(7, 107, 4)
    assert [len(rollout.token_ids) for rollout in rollouts] == drawn
    assert [rollout.finish_reason for rollout in rollouts] == [
        "length" if n == longest else "stop" for n in drawn
    ]


def test_responses_of_one_length_share_a_request_as_in_a_run() -> None:
    rollouts = [Rollout() for _ in range(4)]

    async def scene() -> list[dict[str, Any]]:
        async with obeying() as (client, asked):
            await client.write([1, 2], rollouts, Sampling(n=4), **HOW)
            return asked

    with forced(equal(), prompts=100):
        assert [parameters["n"] for parameters in asyncio.run(scene())] == [4]
    assert [len(rollout.token_ids) for rollout in rollouts] == [64] * 4


def test_drawn_lengths_have_the_stated_mean_and_maximum() -> None:
    drawn = [length for group in range(400) for length in long_tailed().of(group, group, 16)]
    assert 62 < sum(drawn) / len(drawn) < 66 and max(drawn) == 512
    assert set(equal().of(3, 3, 16)) == {64}


def test_lengths_are_free_again_after_the_block() -> None:
    whole = generator.GeneratorClient
    with forced(equal(), prompts=1):
        assert generator.GeneratorClient is not whole
    assert generator.GeneratorClient is whole
