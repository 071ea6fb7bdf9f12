"""Rank 0's side of `lrl join` and `lrl leave`: admits, loses and releases members.

A generator that joins is admitted like a replacement, at a sync, but the run never starts or stops
its process. A member without weights gets work as soon as rank 0 reaches it, and one that was only
cut off comes again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lrl.errors import ConfigError, GeneratorError
from lrl.generators.fleet import Fleet
from lrl.generators.generator import Generator
from lrl.generators.server import JoinedServer
from lrl.generators.settings import ServerSettings
from lrl.members.registry import Kind, Member, Registry, Status
from lrl.system.endpoint import Location
from lrl.workers.pool import Members
from lrl.workers.remote import LEAVE_S, RemoteWorkers

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two polls of the registry."""


async def poll_forever(poll: Callable[[], Awaitable[None]]) -> None:
    """Polls the registry; each `poll` looks once, and admits and removes members."""
    while True:
        await poll()
        await asyncio.sleep(POLL_S)


@dataclass
class GeneratorAdmission:
    """Admits generators of other processes to a fleet, and removes them."""

    fleet: Fleet
    registry: Registry
    token: str
    settings: ServerSettings

    def __post_init__(self) -> None:
        self._generators: dict[int, tuple[JoinedServer, Generator]] = {}
        self._admissions: set[asyncio.Task[None]] = set()

    async def poll(self) -> None:
        """Looks once at the registry."""
        alive = self.registry.alive(Kind.GENERATOR)
        for number, member in alive.items():
            if number not in self._generators and not member.status.over:
                self._connect(number, member.location)
        for number in self.registry.leaving(Kind.GENERATOR):
            await self._remove(number)
        for number, (server, generator) in self._generators.items():
            server.alive = number in alive
            self._report(number, generator)

    def _connect(self, number: int, location: Location) -> None:
        try:
            server = JoinedServer(number, location, self.token, self.settings)
        except (OSError, ValueError) as error:
            why = f"its certificate cannot be read: {error}"
            self.registry.set_status(Kind.GENERATOR, number, Status.REFUSED, why=why)
            return
        generator = Generator(server, self.fleet.capacity)
        self._generators[number] = server, generator
        task = asyncio.get_running_loop().create_task(self._admit(generator))
        self._admissions.add(task)
        task.add_done_callback(self._admissions.discard)

    async def _admit(self, generator: Generator) -> None:
        try:
            await self.fleet.admit(generator)
            log.info("%s joins the run at the next sync.", generator.name.capitalize())
        except GeneratorError as error:
            log.warning("%s may not join: %s", generator.name.capitalize(), error)
            generator.evict(str(error))
            await generator.client.close()

    async def _remove(self, number: int) -> None:
        if self.fleet.rollouts.syncing:
            return  # a collective transfer would fail for all; the request stays in the registry
        generators = {generator.server.number: generator for generator in self.fleet.generators}
        generator = generators.get(number)
        if generator is None:
            refusal = f"The run has no generator {number} now."
        elif not (refusal := leave_refusal(self.fleet, generator)):
            await self.fleet.remove(generator)
            self.registry.set_status(Kind.GENERATOR, number, Status.LEFT, generator.version)
        self.registry.answer_leave(Kind.GENERATOR, number, refusal)

    def _report(self, number: int, generator: Generator) -> None:
        """Writes each change of a generator's status to the registry, until the status is over."""
        before = self.registry.view(Kind.GENERATOR, number).status
        status = self._status_of(generator)
        if status is before or before.over:
            return
        self.registry.set_status(
            Kind.GENERATOR, number, status, version=generator.version, why=generator.eviction or ""
        )
        self.fleet.joined += status is Status.SERVING

    def _status_of(self, generator: Generator) -> Status:
        has_served = generator.served_from is not None
        if generator.eviction is not None:
            return Status.LOST if has_served else Status.REFUSED
        if has_served:
            return Status.SERVING
        return Status.PENDING if generator in self.fleet.generators else Status.STARTING


def leave_refusal(fleet: Fleet, generator: Generator) -> str:
    """Returns the reason why a generator cannot leave; empty if it can."""
    name = generator.name.capitalize()
    if fleet.evaluation is not None and generator in fleet.evaluation.generators:
        return (
            f"{name} is kept for evaluations (strategy.evaluation_generators); only those that "
            "write rollouts leave."
        )
    if generator.eviction is not None:
        return f"{name} is being replaced at this moment: ask again when it is back."
    # A pending one is not among them: its proof may still fail.
    if fleet.rollouts.generators == [generator]:
        return f"{name} is the last one that serves. Have another one join before, or end the run."
    return ""


@dataclass
class WorkerAdmission:
    """Admits members with workers, and removes them."""

    members: Members
    registry: Registry
    token: str

    def __post_init__(self) -> None:
        self._admissions: dict[int, asyncio.Task[None]] = {}
        self._served: set[int] = set()

    async def poll(self) -> None:
        """Looks once at the registry."""
        alive = self.registry.alive(Kind.WORKER)
        for number, member in alive.items():
            if member.status is Status.STARTING and number not in self._admissions:
                task = asyncio.get_running_loop().create_task(self._admit(member))
                self._admissions[number] = task
                task.add_done_callback(lambda _, number=number: self._admissions.pop(number))  # type: ignore[misc]
        known = {each.number: each for each in self.members.all}
        for number in self.registry.leaving(Kind.WORKER):
            self._release(number, known.get(number))
        for number, workers in known.items():
            why = workers.lost or ("" if number in alive else "its process has ended, or is silent")
            if why and self.members.remove(number, why):
                log.warning("%s is lost (%s). Others do its work.", workers.name.capitalize(), why)
                self.registry.set_status(Kind.WORKER, number, Status.LOST, why=why)

    async def _admit(self, member: Member) -> None:
        number, location = member.number, member.location
        count = max(1, member.workers)
        status = Status.REFUSED
        try:
            workers = RemoteWorkers(number, member.node, count, location=location, token=self.token)
            await self.members.check(workers)
        except ConfigError as error:
            why = str(error)
        except (OSError, ValueError) as error:
            # One that has served may only have lost its network, and is tried again when it speaks.
            status = Status.LOST if number in self._served else Status.REFUSED
            why = (
                f"{member.name.capitalize()} on {member.node} cannot be reached at {location.url}: "
                f"{error}. It needs an address that this machine reaches: give it by `lrl join "
                "--host`"
            )
        else:
            self._served.add(number)
            self.members.add(workers)
            log.info("%s has joined, with %d workers.", workers.name.capitalize(), workers.count)
            self.registry.set_status(Kind.WORKER, number, Status.SERVING)
            return
        log.warning("%s.", why.rstrip("."))
        self.registry.set_status(Kind.WORKER, number, status, why=why)

    def _release(self, number: int, workers: RemoteWorkers | None) -> None:
        """Has a member leave, when its work is done or has had the time for it."""
        if workers is None:
            refusal = f"The run has no {Kind.WORKER} {number} now."
            self.registry.answer_leave(Kind.WORKER, number, refusal)
            return
        if workers.leaving_since is None:
            if refusal := self.members.leave_refusal(workers):
                self.registry.answer_leave(Kind.WORKER, number, refusal)
                return
            workers.leaving_since = time.monotonic()
        if workers.idle or time.monotonic() - workers.leaving_since >= LEAVE_S:
            self.members.remove(number, "it leaves the run")
            self.registry.set_status(Kind.WORKER, number, Status.LEFT)
            self.registry.answer_leave(Kind.WORKER, number)
