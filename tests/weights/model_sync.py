"""Generators without servers, and a transport that sends one number: what a sync is tested with."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from lrl.errors import GeneratorError, GeneratorTimeout
from lrl.generators.generator import Generator
from lrl.generators.server import JoinedServer
from lrl.generators.settings import ServerSettings
from lrl.system.endpoint import Location
from lrl.system.ranks import Ranks
from lrl.weights.pool_calls import FINISH, START, UPDATE, PoolCalls
from lrl.weights.transport import Policy, Transport

PAUSE = "/pause?mode=keep&clear_cache=true"


class ModelOfVllm:
    """The routes of a sync, as vLLM and lrl's engines answer them: an update is open until it is
    finished, and meanwhile no other can be started."""

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.paused = False
        self.version = "default"
        self.updating = False
        self.holds: Any = None

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """Raises GeneratorError for an answer of 500."""
        if path == START and self.updating:
            raise GeneratorError(f"{path} answered 500: a weight update is already active")
        if path in (UPDATE, FINISH) and not self.updating:
            raise GeneratorError(f"{path} answered 500: no weight update is active")
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == UPDATE:
            self.load(body["update_info"])
        if path in (START, FINISH):
            self.updating = path == START
        if path == FINISH:
            self.version = body["weight_version"]
        told = {
            "/is_paused": {"is_paused": self.paused},
            "/weight_info": {"weight_version": self.version},
        }
        return told.get(path, {})

    def load(self, info: dict[str, Any]) -> None:
        self.holds = info["value"]


class Client(ModelOfVllm):
    """A generator's client, of which each route may be told to fail so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.last_token_at = 0.0
        self.failing: dict[str, int] = {}
        self.lying: set[str] = set()
        self.silent: set[str] = set()
        self.unanswered: set[str] = set()
        """Done once, and reported as failed."""
        self.logprobs = [-1.0, -1.0]
        """What it answers a proof."""
        self.holding = False
        """Whether a proof waits."""
        self.stuck = ""
        """The route whose calls wait."""

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> Any:
        self.posted.append(route)
        await asyncio.sleep(0)
        end = time.monotonic() + deadline_s
        while route == self.stuck and time.monotonic() <= end:
            await asyncio.sleep(0.001)
        if route == self.stuck or route in self.silent:
            raise GeneratorTimeout(f"{route} did not answer within {deadline_s} s.")
        if self.failing.get(route, 0) > 0:
            self.failing[route] -= 1
            raise GeneratorError(f"{route} answered 500: no")
        answer = {} if route in self.lying else self.answer(route.partition("?")[0], body)
        if route in self.unanswered:
            self.unanswered.remove(route)
            raise GeneratorError(f"{route} failed: the connection was cut")
        return answer

    get = post

    async def flush(self, deadline_s: float) -> None:
        self.posted.append("flush")

    async def prompt_logprobs(
        self, tokens: list[int], *, salt: str, deadline_s: float
    ) -> list[float]:
        self.posted.append("proof")
        while self.holding:
            await asyncio.sleep(0.001)
        return self.logprobs


class Direct(Transport):
    """Sends one number."""

    backend = "direct"

    def __init__(self, policy: Policy, name: str) -> None:
        super().__init__(policy, name)
        self.staged = 0
        self.full = False
        self.closed = 0
        self.value = 0

    def stage(self) -> None:
        self.staged += 1
        if self.full:
            raise OSError("0.00 GiB are free")
        ((_, tensor),) = self.policy.whole_weights()
        self.value = zlib.crc32(tensor.numpy())

    def send(self, calls: PoolCalls) -> None:
        calls.update(lambda one: {"value": self.value})

    def close(self) -> None:
        self.closed += 1


class Copying(Direct):
    """The same, for a policy that changes behind the stage."""

    copies = True


class Collective(Direct):
    """The same in one transfer for all."""

    collective = True


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    yield "head", torch.ones(3)


POLICY: Any = SimpleNamespace(whole_weights=weights, ranks=Ranks())


def make_generators() -> list[Generator]:
    settings = [ServerSettings(dtype="float32") for _ in range(2)]
    servers = [JoinedServer(number, Location(), "", one) for number, one in enumerate(settings)]
    generators = [Generator(server, 4) for server in servers]
    for generator in generators:
        generator.client = Client()  # type: ignore[assignment]
    return generators
