"""The client against a small server of the same routes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from lrl.generators.client import GeneratorClient, GeneratorError
from lrl.generators.sampling import Sampling

T = TypeVar("T")
GENERATE = "/inference/v1/generate"
SPANS = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]


def choice(tokens: int = 5, spans: list[dict[str, Any]] = SPANS) -> dict[str, Any]:
    """An answer as vLLM words it."""
    return {
        "token_ids": list(range(10, 10 + tokens)),
        "logprobs": {"content": [{"logprob": -0.5 * i} for i in range(tokens)]},
        "weight_versions": spans,
        "finish_reason": "length",
    }


def at_server(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    work: Callable[[GeneratorClient], Awaitable[T]],
) -> T:
    """What `work` gives with a client of a server that answers every request by `handler`."""

    async def scene() -> T:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        server = TestServer(app)
        await server.start_server()
        client = GeneratorClient(f"http://127.0.0.1:{server.port}", "generator 7", "secret")
        try:
            return await work(client)
        finally:
            await client.close()
            await server.close()

    return asyncio.run(scene())


def answers_json(answer: dict[str, Any], seen: list[Any] | None = None) -> Any:
    async def handler(request: web.Request) -> web.Response:
        if seen is not None:
            seen.append((request.path, await request.json()))
        return web.json_response(answer)

    return handler


def generate(client: GeneratorClient, deadline_s: float = 5.0) -> Any:
    sampling = Sampling(n=2, max_tokens=9, temperature=0.7)
    return client.generate([1, 2, 3], sampling, version=4, priority=17, deadline_s=deadline_s)


def test_every_token_has_its_log_prob_and_the_version_that_wrote_it() -> None:
    rollouts = at_server(answers_json({"choices": [choice(), choice(2, SPANS[:1])]}), generate)
    assert [rollout.versions for rollout in rollouts] == [[3, 3, 4, 4, 4], [3, 3]]
    assert rollouts[0].token_ids == [10, 11, 12, 13, 14] and rollouts[0].logprobs == [0.0, -0.5, -1.0, -1.5, -2.0]
    assert rollouts[0].finish_reason == "length" and rollouts[0].reward is None


def test_a_request_says_version_priority_and_all_of_the_sampling() -> None:
    seen: list[Any] = []
    at_server(answers_json({"choices": []}, seen), generate)
    ((route, body),) = seen
    assert route == GENERATE and body["token_ids"] == [1, 2, 3]
    assert body["cache_salt"] == "4" and body["priority"] == 17
    assert body["sampling_params"] == {"n": 2, "max_tokens": 9, "temperature": 0.7, "logprobs": 0}


@pytest.mark.parametrize("answer", [choice(4), choice(5, SPANS[:1]), choice() | {"logprobs": {"content": []}}])
def test_a_token_without_version_or_log_prob_is_an_error_that_names_the_generator(answer: dict[str, Any]) -> None:
    with pytest.raises(GeneratorError, match="generator 7: an answer of . tokens"):
        at_server(answers_json({"choices": [answer]}), generate)


def test_prompt_log_probs_are_those_of_the_tokens_after_the_first() -> None:
    entries = [None, {"5": {"logprob": -1.5}}, {"6": {"logprob": -2.5}, "9": {"logprob": -0.1}}]
    seen: list[Any] = []
    found = at_server(
        answers_json({"prompt_logprobs": entries}, seen),
        lambda client: client.prompt_logprobs([4, 5, 6], salt="probe-2", deadline_s=5.0),
    )
    assert found == [-1.5, -2.5] and seen[0][1]["cache_salt"] == "probe-2"


async def never(request: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


def test_a_deadline_names_the_generator_the_route_and_the_seconds() -> None:
    with pytest.raises(GeneratorError, match=f"generator 7: {GENERATE} did not answer within 0.05 s"):
        at_server(never, lambda client: generate(client, 0.05))


def test_a_refusal_is_an_error_with_the_servers_own_words() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=403, text="scale-out is off")

    with pytest.raises(GeneratorError, match="generator 7: /pause answered 403: scale-out is off"):
        at_server(refuse, lambda client: client.post("/pause", deadline_s=5.0))


def test_a_server_that_is_gone_is_an_error_that_names_the_route() -> None:
    async def scene() -> None:
        client = GeneratorClient(f"http://127.0.0.1:{unused_port()}", "generator 7", "secret")
        try:
            assert not await client.healthy(1.0)
            await client.post("/resume", deadline_s=5.0)
        finally:
            await client.close()

    with pytest.raises(GeneratorError, match="generator 7: /resume failed"):
        asyncio.run(scene())


def test_health_is_the_answer_200_in_time() -> None:
    async def ill(request: web.Request) -> web.Response:
        return web.Response(status=503)

    assert at_server(answers_json({}), lambda client: client.healthy(5.0))
    assert not at_server(ill, lambda client: client.healthy(5.0))
    assert not at_server(never, lambda client: client.healthy(0.05))


def test_a_client_closed_twice_can_still_be_used() -> None:
    async def close_twice_and_post(client: GeneratorClient) -> bool:
        await client.post("/resume", deadline_s=5.0)
        await client.close()
        await client.close()
        return await client.healthy(5.0)

    assert at_server(answers_json({}), close_twice_and_post)
