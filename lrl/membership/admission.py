"""The run's side of `lrl serve --join` and `--leave`: polls the registry and admits or removes generators.

    location in the registry -> warm-up -> pending -> (sync, probe) -> serves -> left, lost

A generator that joins is admitted like a replacement, but the run never starts or stops its process.
"""

import asyncio
import logging
from pathlib import Path

from lrl.generators.client import GeneratorError
from lrl.generators.endpoint import Location
from lrl.generators.fleet import Fleet
from lrl.generators.generator import Generator
from lrl.generators.settings import ServerSettings
from lrl.membership.registry import MemberStatus, Registry

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two polls of the registry."""


class JoinedServer:
    """A server that another process has started; see `lrl.generators.generator.ServerHandle`."""

    def __init__(self, number: int, location: Location, token: str, settings: ServerSettings, folder: Path) -> None:
        self.number, self.name = number, f"generator {number}"
        self.location = location
        self.url, self.trust, self.token = location.url, location.context(), token
        self.settings = settings
        self.log_path = folder / f"generator-{number}.log"
        self.alive = True
        """Whether its process ran at the last poll of the registry."""

    def log_tail(self, lines: int = 20) -> str:
        """Returns the last lines of its log; empty if the run's folder has none."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def admit_others(fleet: Fleet, registry: Registry, token: str, settings: ServerSettings, folder: Path) -> None:
    """Admits and removes the generators of other processes as long as `fleet` runs.

    Args:
        fleet: Where they go.
        registry: Where they register.
        token: The run's.
        settings: Those of all generators.
        folder: Where their logs may be.
    """
    fleet.run_in_background(Admission(fleet, registry, token, settings, folder).poll_forever())


class Admission:
    """Admits and removes the generators of other processes."""

    def __init__(self, fleet: Fleet, registry: Registry, token: str, settings: ServerSettings, folder: Path) -> None:
        self.fleet, self.registry = fleet, registry
        self.token, self.settings, self.folder = token, settings, folder
        self._members: dict[int, tuple[JoinedServer, Generator]] = {}
        self._reported: dict[int, MemberStatus] = {}
        self._admissions: set[asyncio.Task[None]] = set()

    async def poll_forever(self) -> None:
        """Polls the registry."""
        while True:
            await self._poll()
            await asyncio.sleep(POLL_S)

    async def _poll(self) -> None:
        locations = self.registry.locations()
        for number in locations.keys() - self._members.keys() - self._reported.keys():
            self._connect(number, locations[number])
        for number in self.registry.leaving():
            await self._remove(number)
        for number, (server, generator) in self._members.items():
            server.alive = number in locations
            self._report(number, status_of(generator))

    def _connect(self, number: int, location: Location) -> None:
        try:
            server = JoinedServer(number, location, self.token, self.settings, self.folder)
        except (OSError, ValueError) as error:
            self._report(number, MemberStatus("refused", why=f"its certificate cannot be read: {error}"))
            return
        generator = Generator(server, self.fleet.capacity)
        self._members[number] = server, generator
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
        why = why_it_stays(self.fleet, generators[number]) if known else f"The run has no generator {number} now."
        if not why:
            await self.fleet.remove(generators[number])
            self._report(number, MemberStatus("left", generators[number].version))
        self.registry.answer_leave(number, why)

    def _report(self, number: int, status: MemberStatus) -> None:
        """Writes each change of a generator's status to the registry; `left`, `lost` and `refused` are final."""
        before = self._reported.get(number)
        if before is None or (before.state != status.state and not before.over):
            self.registry.set_status(number, status)
            self._reported[number] = status
            self.fleet.joined += status.state == "serves"


def why_it_stays(fleet: Fleet, generator: Generator) -> str:
    """Returns the reason why a generator cannot leave; empty if it can."""
    name = generator.name.capitalize()
    if fleet.evaluation is not None and generator in fleet.evaluation.generators:
        return f"{name} is kept for evaluations (strategy.evaluation_generators); only those that write rollouts leave."
    if generator.eviction is not None:
        return f"{name} is being replaced at this moment: ask again when it is back."
    if fleet.rollouts.generators == [generator]:  # a pending one is not among them: its probe may still fail
        return f"{name} is the last one that serves. Have another one join before, or end the run."
    return ""


def status_of(generator: Generator) -> MemberStatus:
    """Returns the present status of a generator that joined."""
    if generator.eviction is None:
        return MemberStatus("waits" if generator.served_from is None else "serves", generator.version)
    return MemberStatus("refused" if generator.served_from is None else "lost", generator.version, generator.eviction)
