"""The run's side of `lrl join` and `lrl leave`: admits, loses and releases generators.

A generator that joins is admitted like a replacement, at a sync, but the run never starts or stops
its process. Members without weights: `lrl.members.worker_admission`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from lrl.errors import GeneratorError
from lrl.generators.fleet import Fleet
from lrl.generators.generator import Generator
from lrl.generators.server import end_of
from lrl.generators.settings import ServerSettings
from lrl.members.member import Kind, Status
from lrl.members.registry import Registry
from lrl.system.endpoint import Location

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two polls of the registry."""


async def poll_forever(poll: Callable[[], Awaitable[None]]) -> None:
    """Polls the registry; each `poll` looks once, and admits and removes members."""
    while True:
        await poll()
        await asyncio.sleep(POLL_S)


class JoinedServer:
    """A server that another process has started; see `lrl.generators.generator.ServerHandle`."""

    def __init__(
        self, number: int, location: Location, token: str, settings: ServerSettings, folder: Path
    ) -> None:
        self.number = number
        self.name = f"generator {number}"
        self.location = location
        self.url = location.url
        self.trust = location.context()
        self.token = token
        self.settings = settings
        self.log_path = folder / f"generator-{number}.log"
        self.alive = True
        """Whether its process had a lease at the last poll of the registry."""

    def log_tail(self) -> str:
        """See `end_of`; empty if the run's folder has no log of it."""
        return end_of(self.log_path.read_text(errors="replace") if self.log_path.exists() else "")


class GeneratorAdmission:
    """Admits and removes the generators of other processes.

    Args:
        fleet: Where they go.
        registry: Where they register.
        token: The run's.
        settings: Those of all generators.
        folder: Where their logs may be.
    """

    def __init__(
        self, fleet: Fleet, registry: Registry, token: str, settings: ServerSettings, folder: Path
    ) -> None:
        self.fleet = fleet
        self.registry = registry
        self.token = token
        self.settings = settings
        self.folder = folder
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
            server = JoinedServer(
                number,
                location,
                token=self.token,
                settings=self.settings,
                folder=self.folder,
            )
        except (OSError, ValueError) as error:
            self.registry.set_status(
                Kind.GENERATOR,
                number,
                Status.REFUSED,
                why=f"its certificate cannot be read: {error}",
            )
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
        known = number in generators
        refusal = (
            leave_refusal(self.fleet, generators[number])
            if known
            else f"The run has no generator {number} now."
        )
        if not refusal:
            await self.fleet.remove(generators[number])
            self.registry.set_status(
                Kind.GENERATOR, number, Status.LEFT, generators[number].version
            )
        self.registry.answer_leave(Kind.GENERATOR, number, refusal)

    def _report(self, number: int, generator: Generator) -> None:
        """Writes each change of a generator's status to the registry, until the status is over."""
        before = self.registry.view(Kind.GENERATOR, number).status
        status = self._status_of(generator)
        if status is before or before.over:
            return
        self.registry.set_status(
            Kind.GENERATOR,
            number,
            status,
            version=generator.version,
            why=generator.eviction or "",
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
    # A pending one is not among them: its probe may still fail.
    if fleet.rollouts.generators == [generator]:
        return f"{name} is the last one that serves. Have another one join before, or end the run."
    return ""
