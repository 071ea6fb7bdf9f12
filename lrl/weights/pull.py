"""Weights that the generators fetch: for other machines, over any distance. The other end is
`lrl.vllm_plugin.fetched_files`.

    every rank stages its part -> order -> machines fetch from all ranks, and from each other, while
    their generators write -> pause -> each loads the file from its machine's memory
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from urllib.parse import urlsplit

import torch

from lrl.generators.generator import Generator
from lrl.system.endpoint import Endpoint, Location, is_loopback, own_address_towards
from lrl.weights.parts import FETCH, FetchOrder, FetchReport
from lrl.weights.pool_calls import Failures, PoolCalls
from lrl.weights.staging import Served, StageOrder
from lrl.weights.transport import Machine, Policy, Transport

log = logging.getLogger(__name__)


class Pull(Transport):
    backend = "pull"
    copies = True
    middleware = ("lrl.vllm_plugin.fetched_files.PullRoutes",)

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        if machine.nodes == 1 or not is_loopback(machine.host):
            return ""
        return (
            f"and the trainer has {machine.nodes} machines, of which only this one is reached at "
            f"strategy.server.host {machine.host}: set that to rank 0's address, and tls_cert and "
            "tls_key or insecure"
        )

    @classmethod
    def join_refusal(cls, same_machine: bool, host: str) -> str:
        if same_machine or not is_loopback(host):
            return ""
        return (
            f"serves its weights (pull) at strategy.server.host {host}, which only its own machine "
            "reaches. Start it with an address that this one reaches, and tls_cert and tls_key or "
            "insecure."
        )

    def __init__(self, policy: Policy, name: str) -> None:
        super().__init__(policy, name)
        self._dtype: torch.dtype | None = None
        self._endpoint = Endpoint()
        self._served: list[Served] = []
        self._checksum = ""  # of the staged version
        self._fetched: dict[Generator, str] = {}  # the path of the staged version on its machine

    def connect(self, calls: PoolCalls) -> None:
        if not self._served:
            own = calls.participants[0].server  # token and settings are those of all
            self._endpoint = own.settings
            dtype = own.settings.dtype
            self._dtype = None if dtype == "auto" else getattr(torch, dtype)
            self._served = self.policy.serve_weights(self._endpoint, own.token)
        super().connect(calls)

    def stage(self) -> None:
        checksum = self.policy.stage_weights(StageOrder(self.name, self._dtype)).checksum
        if checksum != self._checksum:
            self._checksum = checksum
            self._fetched = {}

    def distribute(self, calls: PoolCalls) -> Failures:
        calls.exclude_evicted()
        machines: dict[str, list[Generator]] = {}
        for generator in calls.participants:
            machines.setdefault(machine_of(generator), []).append(generator)
        # The first generator of each machine fetches; the others of the machine have its file.
        first = {one: members[0] for members in machines.values() for one in members}
        peers = [members[0] for members in machines.values() if not is_here(members[0])]
        done = {one: asyncio.Event() for one in first}

        async def fetch(generator: Generator) -> None:
            if (before := first[generator]) is not generator:
                await done[before].wait()
            try:
                beside = self._fetched.get(before, "")
                await self._have_fetched(generator, peers, beside, calls.deadline_s)
            finally:
                done[generator].set()

        return calls.try_each(FETCH, fetch)

    def send(self, calls: PoolCalls) -> None:
        calls.update(lambda one: {"file": self._fetched[one], "checksum": self._checksum})

    async def _have_fetched(
        self, generator: Generator, peers: Sequence[Generator], beside: str, deadline_s: float
    ) -> None:
        started = time.monotonic()
        order = FetchOrder(
            self._checksum,
            ranks=[self._location(one, generator) for one in self._served],
            # One that listens on loopback is reached by no other machine.
            peers=[one.server.location for one in peers if generator in peers],
            number=peers.index(generator) if generator in peers else 0,
            deadline_s=deadline_s,
            beside=beside,
        )
        answer = await generator.client.post(FETCH, asdict(order), deadline_s=deadline_s)
        report = FetchReport(**answer)
        seconds = time.monotonic() - started
        log.info("%s has the weights (%s) after %.1f s.", generator.name, report.how, seconds)
        self._fetched[generator] = report.file
        self.fetched_bytes += report.from_trainer + report.from_peers
        self.sent_bytes += report.from_trainer

    def _location(self, served: Served, generator: Generator) -> Location:
        if isinstance(served, Location):
            return served
        seen = ""
        if self._endpoint.is_everywhere and not is_here(generator):
            seen = own_address_towards(generator.client.url)
        return self._endpoint.location(served, seen)


def machine_of(generator: Generator) -> str:
    return urlsplit(generator.client.url).hostname or ""


def is_here(generator: Generator) -> bool:
    """Whether the trainer reaches a generator on loopback, which only its own machine does."""
    return is_loopback(machine_of(generator))
