"""The routes by which a real vLLM server writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from lrl.errors import RequestRejected
from lrl.generators.client import GeneratorClient
from lrl.generators.generator import Generator, State
from lrl.routing.dispatch import Request
from lrl.types import Prompt, Rollout, Sampling
from tests.lent_server import LentServer, metric

T = TypeVar("T")
PROMPT = [5, 6, 7, 8]
SAMPLING = Sampling(n=64, max_tokens=150)


class Writing:
    """A request for many long responses, which end at no token."""

    def __init__(self, client: GeneratorClient, version: int = 0) -> None:
        self.client = client
        self.version = version
        self.rollouts = [Rollout() for _ in range(SAMPLING.n)]
        how: dict[str, Any] = {"version": lambda: self.version, "priority": 0, "deadline_s": 60.0}
        self.task = asyncio.ensure_future(client.write(PROMPT, self.rollouts, SAMPLING, **how))

    @property
    def lengths(self) -> list[int]:
        return [len(rollout.token_ids) for rollout in self.rollouts]

    async def begun(self) -> None:
        """Waits until every response has its first token; raises the error of the request."""
        while not all(self.lengths):
            if self.task.done():
                await self.task
            await asyncio.sleep(0.001)


def with_client(server: LentServer, work: Callable[[GeneratorClient], Awaitable[T]]) -> T:
    async def scene() -> T:
        client = GeneratorClient(server.url, server.name, server.token, server.location.context())
        try:
            await call(client, "/update_weight_version", {"new_version": "0"})
            async with asyncio.timeout(120):
                return await work(client)
        finally:
            await call(client, "/resume")
            await client.close()

    return asyncio.run(scene())


async def call(client: GeneratorClient, route: str, body: dict[str, Any] | None = None) -> Any:
    return await client.post(route, body, deadline_s=60.0)


def test_after_a_flush_no_token_that_was_written_is_on_its_way(lent_server: LentServer) -> None:
    async def scene(client: GeneratorClient) -> tuple[list[int], Writing]:
        while True:
            writing = Writing(client)
            await writing.begun()
            writing.version = 1  # as on a busy loop, which reads the frames after the sync
            await asyncio.sleep(0.1)
            await client.flush(60.0)
            await call(client, "/pause?mode=keep&clear_cache=false")
            await client.flush(60.0)
            at_the_flush = writing.lengths
            versions = {version for rollout in writing.rollouts for version in rollout.versions}
            assert versions == {0}, "a token is too new"
            await call(client, "/update_weight_version", {"new_version": "1"})
            await call(client, "/resume")
            await writing.task
            if max(at_the_flush) < SAMPLING.max_tokens:
                return at_the_flush, writing
            # All had ended: again.
            await call(client, "/update_weight_version", {"new_version": "0"})

    at_the_flush, writing = with_client(lent_server, scene)
    assert [rollout.versions.count(0) for rollout in writing.rollouts] == at_the_flush
    assert set(writing.lengths) == {SAMPLING.max_tokens}


def test_a_response_that_moves_has_all_tokens_that_its_generator_has_written(
    lent_server: LentServer,
) -> None:
    async def scene(client: GeneratorClient) -> None:
        generator = Generator(lent_server.server, SAMPLING.n)
        generator.version = 0
        generator.state = State.SERVING
        sampling = Sampling(n=8, max_tokens=SAMPLING.max_tokens)
        while True:  # until the generator has written a second token of a response before it moves
            rollouts = [Rollout() for _ in range(sampling.n)]
            prompt = Prompt(id=0, token_ids=PROMPT, text="")
            request = Request(prompt, rollouts, 0, sampling=sampling, deadline_s=60.0)
            writing = asyncio.ensure_future(generator.write(request))
            while not all(rollout.token_ids for rollout in rollouts):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.1)
            before = [len(rollout.token_ids) for rollout in rollouts]
            generator.interrupt(request)
            await writing
            unfinished = [not rollout.finished for rollout in rollouts]
            new = [
                len(rollout.token_ids) - old for rollout, old in zip(rollouts, before, strict=True)
            ]
            if all(unfinished) and any(new):
                break
        assert all(len(set(map(len, (r.token_ids, r.logprobs, r.versions)))) == 1 for r in rollouts)
        await generator.client.close()

    with_client(lent_server, scene)


def test_a_response_whose_client_is_gone_is_not_written_to_its_end(lent_server: LentServer) -> None:
    async def scene(client: GeneratorClient) -> None:
        writing = Writing(client)
        await writing.begun()
        writing.task.cancel()
        await asyncio.gather(writing.task, return_exceptions=True)
        running = 1.0
        while running:
            # The number is that of the last step.
            await client.prompt_logprobs([0, 0], salt="", deadline_s=60.0)
            running = metric(lent_server, "num_requests_running")

    with_client(lent_server, scene)


def test_a_request_that_vllm_refuses_is_rejected_with_its_words(lent_server: LentServer) -> None:
    async def too_long(client: GeneratorClient) -> None:
        how: dict[str, Any] = {"version": lambda: 0, "priority": 0, "deadline_s": 60.0}
        await client.write([5] * 2000, [Rollout()], Sampling(max_tokens=5), **how)

    with pytest.raises(RequestRejected, match="answered 400: .*1024"):
        with_client(lent_server, too_long)


def test_a_response_ends_at_the_stop_tokens_of_its_request(lent_server: LentServer) -> None:
    rollouts, stops = [Rollout() for _ in range(32)], (3, 4, 5, 6)

    async def scene(client: GeneratorClient) -> None:
        sampling = Sampling(n=len(rollouts), max_tokens=SAMPLING.max_tokens, stop_tokens=stops)
        await client.write(
            PROMPT, rollouts, sampling, version=lambda: 0, priority=0, deadline_s=60.0
        )

    with_client(lent_server, scene)
    for rollout in rollouts:
        assert not set(rollout.token_ids[:-1]) & set(stops)
        assert (rollout.token_ids[-1] in stops) == (rollout.finish_reason == "stop")
    assert "stop" in {rollout.finish_reason for rollout in rollouts}
