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
from lrl.system.endpoint import Location
from lrl.system.ranks import Ranks
from lrl.weights.pool_calls import PoolCalls
from lrl.weights.transport import Policy, Transport

INIT, UPDATE = "/init_weight_transfer_engine", "/update_weights"
PAUSE = "/pause?mode=keep&clear_cache=true"


class Client:
    """The routes of a generator, each of which may be told to fail so many times.

    As in vLLM an update is open until it is finished, and meanwhile no other can be started.
    """

    def __init__(self) -> None:
        self.posted: list[str] = []
        self.last_token_at = 0.0
        self.failing: dict[str, int] = {}
        self.lying: set[str] = set()
        self.silent: set[str] = set()
        self.unanswered: set[str] = set()
        """Done once, and reported as failed."""
        self.holds: Any = None
        self.updating = False
        self.logprobs = [-1.0, -1.0]
        """What it answers a proof."""
        self.holding = False
        """Whether a proof waits."""
        self.stuck = ""
        """The route whose calls wait."""
        self.state = {
            "/is_paused": {"is_paused": False},
            "/weight_info": {"weight_version": "default"},
        }

    async def post(self, route: str, body: Any = None, *, deadline_s: float) -> None:
        self.posted.append(route)
        await asyncio.sleep(0)
        end = time.monotonic() + deadline_s
        while route == self.stuck:
            if time.monotonic() > end:
                raise GeneratorTimeout(f"{route} did not answer within {deadline_s} s.")
            await asyncio.sleep(0.001)
        if self.failing.get(route, 0) > 0:
            self.failing[route] -= 1
            raise GeneratorError(f"{route} answered 500: no")
        if route in self.silent:
            raise GeneratorTimeout(f"{route} did not answer within {deadline_s} s.")
        if route in self.lying:
            return
        self._update(route)
        if route == "/update_weights":
            self.holds = body["update_info"]["value"]
        if route == "/finish_weight_update":
            self.state["/weight_info"] = {"weight_version": body["weight_version"]}
        if route == "/resume" or route.startswith("/pause"):
            self.state["/is_paused"] = {"is_paused": route != "/resume"}

        if route in self.unanswered:
            self.unanswered.remove(route)
            raise GeneratorError(f"{route} failed: the connection was cut")

    def _update(self, route: str) -> None:
        if route == "/start_weight_update":
            if self.updating:
                raise GeneratorError(f"{route} answered 500: a weight update is already active")
            self.updating = True
        elif route in ("/update_weights", "/finish_weight_update") and not self.updating:
            raise GeneratorError(f"{route} answered 500: no weight update is active")
        elif route == "/finish_weight_update":
            self.updating = False

    async def flush(self, deadline_s: float) -> None:
        self.posted.append("flush")

    async def prompt_logprobs(
        self, tokens: list[int], *, salt: str, deadline_s: float
    ) -> list[float]:
        self.posted.append("proof")
        while self.holding:
            await asyncio.sleep(0.001)
        return self.logprobs

    async def get(self, route: str, *, deadline_s: float) -> Any:
        await self.post(route, deadline_s=deadline_s)
        return self.state[route]


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
    generators = []
    for number in range(2):
        settings = SimpleNamespace(tensor_parallel_size=1, dtype="float32", quantization=None)
        settings.extra_args = {}
        server: Any = SimpleNamespace(
            url="", token="", location=Location(), alive=True, settings=settings
        )
        vars(server).update(name=f"generator {number}", log_tail=lambda: "")
        generator = Generator(server, 4)
        generator.client = Client()
        generators.append(generator)
    return generators
