"""A fleet without processes: a real pool over clients that write on a virtual clock, and servers
that only count."""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any
from unittest.mock import AsyncMock

import pytest

from lrl.generators.client import GeneratorClient
from lrl.generators.generator import Generator, State
from lrl.generators.pool import GeneratorPool
from lrl.generators.server import JoinedServer, Server
from lrl.generators.settings import ServerSettings
from lrl.planning.clock import run
from lrl.routing.dispatch import DispatchPolicy, Request
from lrl.routing.migration import Migration
from lrl.system.endpoint import LOOPBACK, Location
from lrl.types import Prompt, Rollout, Sampling

TOKENS = 1_000
ANSWERING = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Health).serve_forever()
"""


@dataclass(eq=False)
class Asked:
    """A request at a generator, in the words of `GeneratorClient.write`."""

    prompt_ids: list[int]
    rollouts: Sequence[Rollout]
    sampling: Sampling
    _: KW_ONLY
    version: Callable[[], int]
    priority: int
    deadline_s: float
    ended: Callable[[], None]
    leaves: Callable[[], bool]

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.under = self.version()
        self.had = len(self.rollouts[0].token_ids)
        self.at = loop.time()
        self.done: asyncio.Future[None] = loop.create_future()
        """For a test that writes the responses itself."""

    def add(self, rollout: Rollout, token: int, logprob: float) -> None:
        rollout.token_ids.append(token)
        rollout.logprobs.append(logprob)
        rollout.versions.append(self.version())

    def end(self, rollout: Rollout) -> None:
        cut = len(rollout.token_ids) == self.sampling.max_tokens
        rollout.finish_reason = "length" if cut else "stop"
        self.ended()


class ModelClient:
    """A generator's client. It writes the responses to a prompt in `prompt.token_ids[0]` tokens, one
    in `seconds`, and records what it is asked; subclasses `fill` them otherwise."""

    last_token_at = 0.0
    error: Exception | None = None

    def __init__(self, seconds: Callable[[Asked], float] = lambda asked: 1.0) -> None:
        self.seconds = seconds
        self.asked: list[Asked] = []
        self.open: list[Asked] = []
        self.most = 0
        self.posted: list[str] = []

    async def write(self, *words: Any, **how: Any) -> None:
        asked = Asked(*words, **how)
        self.asked.append(asked)
        self.open.append(asked)
        self.most = max(self.most, sum(len(one.rollouts) for one in self.open))
        try:
            await self.fill(asked)
        finally:
            self.open.remove(asked)

    async def fill(self, asked: Asked) -> None:
        for token in range(asked.had, asked.prompt_ids[0]):
            await asyncio.sleep(self.seconds(asked))
            if self.error is not None:
                raise self.error
            for rollout in asked.rollouts:
                asked.add(rollout, token, -1.0 - token)
        for rollout in asked.rollouts:
            asked.end(rollout)

    async def flush(self, deadline_s: float) -> None:
        if self.error is not None:
            raise self.error
        self.posted.append("flush")

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> Any:
        self.posted.append(route)
        await asyncio.sleep(0.1)

    @functools.cached_property
    def generate(self) -> Callable[..., Coroutine[Any, Any, None]]:
        """Of a pool whose only generator has this client; it holds version 5."""
        pool, _ = make_pool(99, clients=[self])
        pool.generators[0].version = 5
        return functools.partial(pool.generate, deadline_s=9.0)


class Known:
    """Expects what the model client writes."""

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        return prompt.token_ids[0]

    def quantile(self, share: float) -> float:
        return 100 * share


def make_pool(
    *capacities: int,
    clients: Sequence[Any] = (),
    dispatch: DispatchPolicy | None = None,
    migration: Migration | None = None,
) -> tuple[GeneratorPool, list[Any]]:
    clients = list(clients) or [ModelClient() for _ in capacities]
    generators = [make_generator(*each) for each in zip(itertools.count(), capacities, clients)]
    for generator in generators:
        generator.version = 0
        generator.state = State.SERVING
    return GeneratorPool(generators, dispatch, migration), clients


def make_generator(number: int, capacity: int, client: Any = None) -> Generator:
    server = JoinedServer(number, Location(), token="", settings=ServerSettings(), alive=False)
    generator = Generator(server, capacity)
    generator.client = client or ModelClient()
    return generator


def request(prompt_tokens: int, *rollouts: Rollout) -> Request:
    return Request(Prompt(id=0, token_ids=[1] * prompt_tokens, text=""), rollouts, priority=0)


async def ask(
    pool: GeneratorPool, n: int = 2, seconds: int = 1, priority: int = 0, spare: bool = False
) -> None:
    rollouts = [Rollout() for _ in range(n)]
    prompt = Prompt(id=0, token_ids=[seconds], text="")
    sampling = Sampling(n=n, max_tokens=TOKENS)
    how: dict[str, Any] = {"priority": priority, "deadline_s": 9.0, "spare": spare}
    await pool.generate(prompt, rollouts, sampling, **how)
    assert all(
        rollout.finished and rollout.token_ids == list(range(seconds)) for rollout in rollouts
    )


async def gather(questions: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*questions))


async def resync(pool: GeneratorPool, version: int) -> None:
    """A sync in which nothing goes wrong."""
    await gather([generator.pause() for generator in pool.generators])
    await gather([generator.resume(version) for generator in pool.generators])
    for generator in pool.generators:
        generator.open()
    await pool.finish_sync({})


def on_a_virtual_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on a clock that jumps to the next event."""

    @functools.wraps(test)
    def runs(*arguments: Any, **more: Any) -> None:
        run(test(*arguments, **more))

    return runs


class Uneven(ModelClient):
    """Responses to a prompt end one after another, a second apart."""

    async def fill(self, asked: Asked) -> None:
        for rollout in asked.rollouts:
            await asyncio.sleep(1)
            asked.end(rollout)


class Scripted(Server):
    """A server that runs a Python program in vLLM's place; this one answers at once."""

    program = ANSWERING

    def command(self) -> list[str]:
        place = ["--host", LOOPBACK, "--port", str(self.port)]
        return [sys.executable, "-c", self.program, *place]


class ModelServer(JoinedServer):
    """A process that starts at once and counts its starts."""

    def __init__(self, number: int, token: str = "secret") -> None:
        super().__init__(
            number, Location("http://127.0.0.1:1"), token, ServerSettings(), alive=False
        )
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        self.alive = True

    def ready(self) -> bool:
        return True

    def wait_ready(self, interrupted: Any = None) -> None:
        """It is ready."""

    def stop(self) -> None:
        self.alive = False


def let_requests_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every generator answers, like every running process."""
    monkeypatch.setattr(GeneratorClient, "prompt_logprobs", AsyncMock())
