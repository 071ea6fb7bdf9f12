"""The run's end of `lrl serve --join` and `--leave`: it looks into the register and does what is asked there.

    address in the register -> warm-up -> newcomer -> (sync, probe) -> serves -> left, lost

A generator that joins goes the way of a replacement. It is another process's: the run never starts or stops it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from lrl.generators.client import GeneratorError
from lrl.generators.fleet import Fleet
from lrl.generators.generator import Generator
from lrl.generators.settings import ServerSettings
from lrl.membership.registry import Address, JoinSpec, MemberStatus, Registry

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often the register is looked into."""


class JoinedServer:
    """A server that another process has started, as far as its generator must know it.

    Args:
        number: Of the generator.
        address: Where it answers.
        token: The run's.
        settings: The run's own; a generator that joins has the same.
        folder: The run's.
    """

    def __init__(self, number: int, address: Address, token: str, settings: ServerSettings, folder: Path) -> None:
        self.number, self.name = number, f"generator {number}"
        self.url, self.trust, self.token = address.url, address.context(), token
        self.settings = settings
        self.log_path = folder / f"generator-{number}.log"
        self.alive = True
        """Whether its process runs, as it was last seen in the register."""

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log, as far as the run's folder has it."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def admit_others(fleet: Fleet, registry: Registry, spec: JoinSpec) -> None:
    """From now on generators of other processes may join `fleet`, and any may be asked to leave, by `registry`.

    Raises:
        OSError: There can be no register.
    """
    registry.open(spec)
    own = fleet.first_server

    def make_server(number: int, address: Address) -> JoinedServer:
        return JoinedServer(number, address, own.token, own.settings, registry.run)

    fleet.run_in_background(Admission(fleet, registry, make_server).attend())


class Admission:
    """Lets generators in and out.

    Args:
        fleet: What they join and leave.
        register: Where they ask.
        make_server: Makes the server of a newcomer from its number and address.
    """

    def __init__(self, fleet: Fleet, registry: Registry, make_server: Callable[[int, Address], JoinedServer]) -> None:
        self.fleet, self.registry, self.make_server = fleet, registry, make_server
        self._came: dict[int, tuple[JoinedServer, Generator]] = {}
        self._said: dict[int, MemberStatus] = {}
        self._welcomes: set[asyncio.Task[None]] = set()
        self._in_trouble = False

    async def attend(self) -> None:
        """Look for ever. A disk that fails for a while is said once, and looked into again."""
        while True:
            try:
                await self._look()
                self._in_trouble = False
            except OSError as error:
                if not self._in_trouble:
                    log.warning("Nobody can join or leave the run at the moment: %s", error)
                self._in_trouble = True
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        addresses, leaving = await asyncio.to_thread(self.registry.look)
        for number in addresses.keys() - self._came.keys() - self._said.keys():
            await self._welcome(number, addresses[number])
        for number in leaving:
            await self._let_go(number)
        for number, (server, generator) in self._came.items():
            server.alive = number in addresses and not addresses[number].owner.ended
            await self._say(number, status_of(generator))

    async def _welcome(self, number: int, address: Address) -> None:
        try:
            server = self.make_server(number, address)
        except (OSError, ValueError) as error:
            await self._say(number, MemberStatus("refused", why=f"its certificate cannot be read: {error}"))
            return
        generator = Generator(server, self.fleet.capacity)
        self._came[number] = server, generator
        task = asyncio.get_running_loop().create_task(self._admit(generator))
        self._welcomes.add(task)
        task.add_done_callback(self._welcomes.discard)

    async def _admit(self, generator: Generator) -> None:
        try:
            await self.fleet.admit(generator)
            log.info("%s joins the run at the next sync.", generator.name.capitalize())
        except GeneratorError as error:
            log.warning("%s may not join: %s", generator.name.capitalize(), error)
            generator.evict(str(error))
            await generator.client.close()

    async def _let_go(self, number: int) -> None:
        if self.fleet.rollouts.syncing:
            return  # in a collective transfer one that is missing is everybody's failure; the wish is still there
        generators = {generator.server.number: generator for generator in self.fleet.generators}
        known = number in generators
        why = why_it_stays(self.fleet, generators[number]) if known else f"The run has no generator {number} now."
        if not why:
            await self.fleet.remove(generators[number])
            await self._say(number, MemberStatus("left", generators[number].version))
        await asyncio.to_thread(self.registry.response, number, why)

    async def _say(self, number: int, status: MemberStatus) -> None:
        """Write down what became of a generator, once for each change; who has left has done so for good."""
        before = self._said.get(number)
        if before is None or (before.state != status.state and not before.over):
            await asyncio.to_thread(self.registry.decide, number, status)
            self._said[number] = status
            self.fleet.joined += status.state == "serves"


def why_it_stays(fleet: Fleet, generator: Generator) -> str:
    """Why a generator cannot be let go; empty if it can."""
    name = generator.name.capitalize()
    if fleet.evaluation is not None and generator in fleet.evaluation.generators:
        return f"{name} is kept for evaluations (strategy.evaluation_generators); only those that write rollouts leave."
    if generator.out is not None:
        return f"{name} is being replaced at this moment: ask again when it is back."
    if fleet.rollouts.generators == [generator]:  # who waits for a sync is not among them: nobody may rely on it yet
        return f"{name} is the last one that serves. Have another one join before, or end the run."
    return ""


def status_of(generator: Generator) -> MemberStatus:
    """Where a generator that came is by now."""
    if generator.out is None:
        return MemberStatus("waits" if generator.served_from is None else "serves", generator.version)
    return MemberStatus("refused" if generator.served_from is None else "lost", generator.version, generator.out)
