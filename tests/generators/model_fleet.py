"""A fleet without processes: clients that write on a virtual clock or when the test says
so, and servers that only count."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from lrl.errors import GeneratorError, ServerError
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


class ModelClient:
    """Writes the responses to a prompt in `prompt.token_ids[0]` seconds, a token a second, and
    records what it did."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int, float]] = []
        """(first token of the prompt, version, priority, deadline)"""
        self.requests: list[tuple[int, int]] = []
        """(responses, tokens they had)"""
        self.posted: list[str] = []
        self.writing = self.most = 0
        self.last_token_at = 0.0
        self.error: GeneratorError | None = None

    async def write(
        self,
        prompt_ids: list[int],
        rollouts: Sequence[Rollout],
        sampling: Sampling,
        *,
        version: Callable[[], int],
        priority: int,
        deadline_s: float,
        **how: Any,
    ) -> None:
        self.asked.append((prompt_ids[0], version(), priority, deadline_s))
        self.requests.append((len(rollouts), len(rollouts[0].token_ids)))
        self.writing += len(rollouts)
        self.most = max(self.most, self.writing)
        try:
            for _ in range(prompt_ids[0] - len(rollouts[0].token_ids)):
                await asyncio.sleep(1)
                if self.error is not None:
                    raise self.error
                for rollout in rollouts:
                    rollout.token_ids.append(len(rollout.token_ids))
                    rollout.logprobs.append(-1.0)
                    rollout.versions.append(version())
        finally:
            self.writing -= len(rollouts)
        for rollout in rollouts:
            rollout.finish_reason = "stop"
            how["ended"]()

    async def flush(self, deadline_s: float) -> None:
        if self.error is not None:
            raise self.error
        self.posted.append("flush")

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> None:
        self.posted.append(route)
        await asyncio.sleep(0.1)


class Known:
    """Expects what the model client writes."""

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        return prompt.token_ids[0]

    def quantile(self, share: float) -> float:
        return 100 * share


def make_pool(
    *capacities: int, dispatch: DispatchPolicy | None = None, migration: Migration | None = None
) -> tuple[GeneratorPool, list[ModelClient]]:
    generators = [make_generator(number, capacity) for number, capacity in enumerate(capacities)]
    for generator in generators:
        generator.version = 0
        generator.state = State.SERVING
    pool = GeneratorPool(generators, dispatch, migration)
    return pool, [generator.client for generator in generators]  # type: ignore[misc]


def make_generator(number: int, capacity: int, client: Any = None) -> Generator:
    server = JoinedServer(number, Location(), token="", settings=ServerSettings(), alive=False)
    generator = Generator(server, capacity)
    generator.client = client or ModelClient()
    return generator


def request(prompt_tokens: int, *rollouts: Rollout) -> Request:
    return Request(Prompt(id=0, token_ids=[1] * prompt_tokens, text=""), rollouts, priority=0)


async def ask(
    pool: GeneratorPool, n: int = 2, seconds: int = 1, priority: int = 0, spare: bool = False
) -> list[Rollout]:
    rollouts = [Rollout() for _ in range(n)]
    prompt = Prompt(id=0, token_ids=[seconds], text="")
    sampling = Sampling(n=n, max_tokens=TOKENS)
    how: dict[str, Any] = {"priority": priority, "deadline_s": 9.0, "spare": spare}
    await pool.generate(prompt, rollouts, sampling, **how)
    assert all(
        rollout.finished and rollout.token_ids == list(range(seconds)) for rollout in rollouts
    )
    return rollouts


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

    async def write(
        self, prompt_ids: list[int], rollouts: Sequence[Rollout], *args: Any, **how: Any
    ) -> None:
        self.asked.append((prompt_ids[0], 0, how["priority"], asyncio.get_running_loop().time()))
        self.asked_for = list(rollouts)
        for rollout in rollouts:
            await asyncio.sleep(1)
            rollout.finish_reason = "stop"
            how["ended"]()


@dataclass(eq=False)
class Asked:
    """A request at a generator."""

    group: int
    rollouts: Sequence[Rollout]
    ended: Callable[[], None]
    done: asyncio.Future[None]
    max_tokens: int
    """Of a response."""


class ManualClient:
    """A model of a generator's client: a request waits until the test writes its responses."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []
        self.last_token_at = 0.0

    async def write(
        self,
        prompt_ids: list[int],
        rollouts: Sequence[Rollout],
        sampling: Sampling,
        *,
        priority: int,
        **how: Any,
    ) -> None:
        assert not any(rollout.finished for rollout in rollouts), (
            "a finished response is requested again"
        )
        assert all(len(rollout.token_ids) < sampling.max_tokens for rollout in rollouts), (
            "max_tokens of 0 is requested"
        )
        asked = Asked(
            priority,
            rollouts,
            how["ended"],
            done=asyncio.get_running_loop().create_future(),
            max_tokens=sampling.max_tokens,
        )
        self.requests.append(asked)
        try:
            await asked.done
        finally:
            self.requests.remove(asked)

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> None:
        """Ignores pause and resume: only the test writes."""


class Scripted(Server):
    """A server that runs a Python program in vLLM's place; this one answers at once."""

    program = ANSWERING

    def command(self) -> list[str]:
        place = ["--host", LOOPBACK, "--port", str(self.port)]
        return [sys.executable, "-c", self.program, *place]


class ModelServer:
    """A process that starts at once and counts its starts."""

    token = "secret"
    location = Location("http://127.0.0.1:1")
    url = "http://127.0.0.1:1"

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"generator {number}"
        self.log_path = f"generator-{number}.log"
        self.settings = ServerSettings()
        self.alive = False
        self.starts: list[float] = []
        self.failing = 0

    def start(self) -> None:
        self.starts.append(time.monotonic())
        self.alive = True

    def ready(self) -> bool:
        if self.failing:
            self.failing -= 1
            self.alive = False
            raise ServerError(f"Generator {self.number} ended with exit status 1.")
        return True

    def wait_ready(self, interrupted: Any = None) -> None:
        self.ready()

    def stop(self) -> None:
        self.alive = False

    def log_tail(self) -> str:
        return "CUDA out of memory"

    def error(self, event: str) -> ServerError:
        return ServerError(f"{self.name.capitalize()} {event}:\nCUDA out of memory")


def let_requests_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every generator answers, like every running process."""

    async def respond(self: GeneratorClient, *words: Any, **settings: Any) -> None:
        """Succeeds."""

    monkeypatch.setattr(GeneratorClient, "prompt_logprobs", respond)
