"""All members of a run: rank 0 admits, loses and releases them.

A generator that joins is admitted like a replacement, at a sync, but the run never starts or stops
its process. A member with workers gets work as soon as rank 0 reaches it, and one that was only
cut off comes again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError, GeneratorError, ServerError
from lrl.generators.fleet import Fleet
from lrl.generators.generator import Generator
from lrl.generators.server import JoinedServer
from lrl.generators.settings import ServerSettings
from lrl.members.launched import ATTEMPTS, LaunchedMembers
from lrl.members.registry import (
    JoinSpec,
    Kind,
    Member,
    Registry,
    RegistryServer,
    RunClient,
    Status,
    remove_run_file,
    write_run_file,
)
from lrl.system.endpoint import Location, is_loopback
from lrl.system.output import best_effort
from lrl.workers.pool import Members
from lrl.workers.remote import LEAVE_S, RemoteWorkers

if TYPE_CHECKING:
    from lrl.run import Run

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Seconds between two looks at the registry."""
SETTINGS = {Kind.GENERATOR: "strategy.launcher", Kind.WORKER: "data.worker_launcher"}
"""Where users name a launcher."""


@dataclass
class RunMembers:
    """Lets members join a run, from `open` to `close`."""

    fleet: Fleet
    workers: Members | None
    """Members with workers; None if the run takes none."""
    launched: list[LaunchedMembers]
    """What a launcher starts, or somebody in its place; other members come by themselves."""
    settings: ServerSettings
    folder: Path
    server: RegistryServer

    @property
    def registry(self) -> Registry:
        return self.server.registry

    def open(self) -> None:
        """Writes and prints where members join, admits workers, and starts the launchers' jobs."""
        with best_effort("The address for joining members", self.folder):
            write_run_file(self.folder, self.server)
        by_others = [one.kind for one in self.launched if not one.launcher.starts]
        for kind in [Kind.GENERATOR] if self.workers is None else Kind:
            if kind in by_others or not is_loopback(self.settings.host):
                where = self.server.elsewhere.url
                rank_zero_info(f"Other {kind}s join by: lrl join {where} --kind {kind}")
        if self.workers is not None:
            admission = WorkerAdmission(self.workers, self.registry, self.server.token)
            self.fleet.run_in_background(poll_forever(admission.poll))
        for launched in self.launched:
            launched.start()

    def admit(self, of_nodes: int, interrupted: Callable[[], None]) -> None:
        """Admits generators from now on, and waits for the requested members, also for `of_nodes`
        generators of other ranks' nodes; see `wait_joined`."""
        admission = GeneratorAdmission(self.fleet, self.registry, self.server.token, self.settings)
        self.fleet.run_in_background(poll_forever(admission.poll))
        if of_nodes:
            self.wait_joined(Kind.GENERATOR, of_nodes, interrupted)
        for launched in self.launched:
            launcher = launched.launcher
            rank_zero_info(
                f"Waiting until {launcher.jobs} {launched.kind}(s) of {type(launcher).__name__} have "
                f"joined at {self.server.elsewhere.url}."
            )
            self.wait_joined(launched.kind, launcher.jobs, interrupted)

    def wait_joined(self, kind: Kind, wanted: int, interrupted: Callable[[], None]) -> None:
        """Waits until so many members have joined, for `server.start_timeout_s` at most; calls
        `interrupted`, which may raise, at every look. Raises ServerError if a launcher was to start
        them, and none has joined by then, or each job has failed several times."""
        limit = f"within server.start_timeout_s={self.settings.start_timeout_s:g}"
        end = time.monotonic() + self.settings.start_timeout_s
        while (joined := len(self.registry.joined(kind))) < wanted:
            interrupted()
            self.raise_if_all_failed()
            if time.monotonic() > end:
                for launched in self.launched:
                    if launched.kind is kind and not joined:
                        raise self._no_member_error(launched, limit)
                log.warning(
                    "Only %d of %d %ss have joined %s; the run begins. Their output says why.",
                    *(joined, wanted, kind, limit),
                )
                return
            time.sleep(POLL_S)

    def raise_if_all_failed(self) -> None:
        """Raises ServerError if all jobs of a launcher have failed several times, and none
        serves."""
        for launched in self.launched:
            if launched.all_failed and not self.registry.joined(launched.kind):
                raise self._no_member_error(launched, f"in {ATTEMPTS} attempts")

    def close(self) -> None:
        """Tells members that the run ends, and ends the launchers' jobs."""
        if self.workers is not None:
            self.workers.close()
        self.registry.end()
        for launched in self.launched:
            launched.stop()
        self.server.close()
        with best_effort("The end of the run", self.folder):
            remove_run_file(self.folder)

    def _no_member_error(self, launched: LaunchedMembers, when: str) -> ServerError:
        kind, name = launched.kind, type(launched.launcher).__name__
        found = [each.why for each in self.registry.members(kind) if each.status is Status.REFUSED]
        words = found[-1] if found else launched.last_words
        cause = f" The last one ended with:\n{words}" if words else ""
        return ServerError(f"{SETTINGS[kind]} {name}: no {kind} has joined {when}.{cause}")


async def poll_forever(poll: Callable[[], Awaitable[None]]) -> None:
    while True:
        await poll()
        await asyncio.sleep(POLL_S)


@dataclass
class GeneratorAdmission:
    """Admits generators of other processes, and removes them and the run's own."""

    fleet: Fleet
    registry: Registry
    token: str
    settings: ServerSettings

    def __post_init__(self) -> None:
        self._generators: dict[int, Generator] = {}

    async def poll(self) -> None:
        members = self.registry.members(Kind.GENERATOR)
        for member in members:
            if (generator := self._generators.get(member.number)) is not None:
                assert isinstance(generator.server, JoinedServer)
                generator.server.alive = member.alive
                self._report(member, generator)
            elif member.alive and not member.status.over:
                self._begin(member.number, member.location)
        for member in members:  # by itself: the end of a server takes longer than a lease
            if member.leaving:
                await self._remove(member.number)

    def _begin(self, number: int, location: Location) -> None:
        server = JoinedServer(number, location, self.token, self.settings)
        try:
            generator = Generator(server, self.fleet.capacity)
        except (OSError, ValueError) as error:
            why = f"its certificate cannot be read: {error}"
            self.registry.change(Kind.GENERATOR, number, status=Status.REFUSED, why=why)
            return
        self._generators[number] = generator
        self.fleet.run_in_background(self._admit(generator))

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
            left = {"status": Status.LEFT, "version": generator.version}
            self.registry.change(Kind.GENERATOR, number, **left)
        self.registry.change(Kind.GENERATOR, number, leaving=False, leave_refusal=refusal)

    def _report(self, member: Member, generator: Generator) -> None:
        """Writes each change of a generator's status to the registry, until the status is over."""
        why = generator.eviction
        if generator.served_from is not None:
            status = Status.SERVING if why is None else Status.LOST
        elif why is not None:
            status = Status.REFUSED
        else:
            status = Status.PENDING if generator in self.fleet.generators else Status.STARTING
        if status is not member.status and not member.status.over:
            now = {"status": status, "version": generator.version, "why": why or ""}
            self.registry.change(Kind.GENERATOR, member.number, **now)
            self.fleet.joined += status is Status.SERVING


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
    members: Members
    registry: Registry
    token: str

    def __post_init__(self) -> None:
        self._admissions: dict[int, asyncio.Task[None]] = {}
        self._served: set[int] = set()

    async def poll(self) -> None:
        known = {each.number: each for each in self.members.all}
        for member in self.registry.members(Kind.WORKER):
            number, workers = member.number, known.get(member.number)
            starts = member.alive and member.status is Status.STARTING
            if starts and number not in self._admissions:
                task = asyncio.get_running_loop().create_task(self._admit(member))
                self._admissions[number] = task
                task.add_done_callback(partial(self._admissions.pop, number))
            if member.leaving:
                self._release(number, workers)
            if workers is None:
                continue
            why = workers.lost or ("" if member.alive else "its process has ended, or is silent")
            if why and self.members.remove(number, why):
                log.warning("%s is lost (%s). Others do its work.", workers.name.capitalize(), why)
                self.registry.change(Kind.WORKER, number, status=Status.LOST, why=why)

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
            self.registry.change(Kind.WORKER, number, status=Status.SERVING)
            return
        log.warning("%s.", why.rstrip("."))
        self.registry.change(Kind.WORKER, number, status=status, why=why)

    def _release(self, number: int, workers: RemoteWorkers | None) -> None:
        """Has a member leave, when its work is done or has had `LEAVE_S`."""
        refusal = f"The run has no {Kind.WORKER} {number} now."
        if workers is None or (refusal := self.members.leave_refusal(workers)):
            self.registry.change(Kind.WORKER, number, leaving=False, leave_refusal=refusal)
            return
        now = time.monotonic()
        workers.leaving_since = workers.leaving_since or now
        if workers.idle or now - workers.leaving_since >= LEAVE_S:
            self.members.remove(number, "it leaves the run")
            self.registry.change(Kind.WORKER, number, status=Status.LEFT, leaving=False)


def make_members(run: Run, fleet: Fleet) -> RunMembers:
    """Makes the server where members join; raises ConfigError if its port is taken."""
    data, strategy = run.data, run.strategy
    # The responses of an evaluation are scored on rank 0 alone.
    pools = [data.reward_pool.workers] if run.trains else []
    if data.environment is not None and data.environment.workers is not None:
        pools.append(data.environment.workers)
    workers = Members(*pools) if pools else None
    settings, folder = strategy.settings_of(run), run_folder(run.trainer)
    spec = join_spec(run, len(fleet.generators), {} if workers is None else workers.terms())
    registry = Registry(spec)
    server = RegistryServer(registry, settings, strategy.token, strategy.join_port)
    client, launched = RunClient(server.elsewhere, server.token), []
    if (launcher := strategy.generator_launcher) is not None:
        launcher.gpus = 0 if spec.on_cpu else settings.tensor_parallel_size
        launched.append(
            LaunchedMembers(launcher, Kind.GENERATOR, client, folder=folder, registry=registry)
        )
    if (launcher := data.worker_launcher) is not None and pools:
        launched.append(
            LaunchedMembers(launcher, Kind.WORKER, client, folder=folder, registry=registry)
        )
    return RunMembers(fleet, workers, launched, settings=settings, folder=folder, server=server)


def join_spec(run: Run, generators: int, terms: dict[str, Any]) -> JoinSpec:
    """Returns what a member must share with the run, which starts so many generators."""
    model, transport = run.policy.policy_folder, run.strategy.choose_transport()
    return JoinSpec(
        model=os.path.abspath(model) if os.path.exists(model) else model,
        settings=asdict(run.strategy.settings_of(run)),
        transport=transport.backend,
        run_id=run.strategy.run_id,
        on_cpu=run.strategy.root_device.type != "cuda",
        generators=generators,
        seed=run.strategy.seed_of(run),
        environment=transport.common_environment(os.environ),
        serves_model=os.path.isdir(model),
        terms=terms,
    )
