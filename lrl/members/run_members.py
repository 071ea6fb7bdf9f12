"""All members of a run, from the opened registry to the end; those that a launcher starts are jobs,
replaced when they fail."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lrl.errors import NotRunning, ServerError
from lrl.generators.fleet import Fleet
from lrl.generators.settings import ServerSettings
from lrl.members.admission import GeneratorAdmission, WorkerAdmission, poll_forever
from lrl.members.launchers import Job, Launcher
from lrl.members.registry import JoinSpec, Kind, Member, Registry, RegistryServer, RunClient, Status
from lrl.members.run_file import RUN_CERTIFICATE, RUN_TOKEN, remove_run_file, write_run_file
from lrl.system.best_effort import best_effort
from lrl.system.endpoint import Location, is_loopback
from lrl.system.job_supervisor import Condition, JobState, JobSupervisor, Slot
from lrl.workers.pool import Members

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Jobs of each slot that may fail before a run gives up at its start."""
OWN_END_S = 20.0
"""Seconds in which a job must end by itself after the run has announced its end."""
POLL_S = 0.1


class LaunchedMembers(JobSupervisor):
    """Starts, watches, replaces and ends the jobs of a launcher, which join the run.

    Args:
        launcher: What starts them.
        kind: What they are.
        roster: Where they join: the registry on rank 0, or its client elsewhere.
        location: Where they reach it.
        token: The run's.
        folder: The run's.
    """

    def __init__(
        self,
        launcher: Launcher,
        kind: Kind,
        roster: Registry | RunClient,
        location: Location,
        token: str,
        folder: Path,
    ) -> None:
        words = ["join", location.url, "--kind", str(kind)]
        # The token may be in no word of a command: every user of a machine can read those.
        environment = {**os.environ, RUN_TOKEN: token, RUN_CERTIFICATE: location.certificate}
        self.slots = [
            _LaunchedSlot(
                launcher,
                kind,
                index,
                roster=roster,
                words=words,
                environment=environment,
                folder=folder,
            )
            for index in range(launcher.jobs if launcher.starts else 0)
        ]
        super().__init__(self.slots)

    @property
    def last_words(self) -> str:
        """The output of the job that failed last, or the resource that a job waits for."""
        return self.last_failure or next(filter(None, (slot.tail() for slot in self.slots)), "")


@dataclass(eq=False)
class _LaunchedSlot(Slot):
    """The slot of one job of a launcher."""

    launcher: Launcher
    kind: Kind
    index: int
    roster: Registry | RunClient
    words: Sequence[str]
    """After `lrl`, the same for all slots."""
    environment: Mapping[str, str]
    folder: Path
    job: Job | None = None
    number: int = -1

    def __post_init__(self) -> None:
        self.name = str(self.kind)

    def start(self) -> None:
        try:
            self.number = self.roster.claim(self.kind)
        except NotRunning as error:
            raise ConnectionError(str(error)) from error
        self.name = f"{self.kind} {self.number}"
        self.job = self.launcher.start(
            f"{self.kind}-{self.number}",
            self.index,
            words=[*self.words, *self._own_words(), "--number", str(self.number)],
            environment=self.environment,
            folder=self.folder,
        )

    def _own_words(self) -> list[str]:
        if not self.kind.has_weights:
            return [] if self.launcher.cores is None else ["--workers", str(self.launcher.cores)]
        devices = ",".join(map(str, self.launcher.devices(self.index)))
        return ["--devices", devices] if devices else []

    def condition(self) -> Condition:
        assert self.job is not None, "it was started"
        try:
            member = self.roster.view(self.kind, self.number)
        except NotRunning:  # on another node: the run is gone, or does not answer now
            member = Member(self.kind, self.number)
        status = member.status
        if status.over:
            if status is Status.ENDED or (status is Status.LEFT and not member.by_itself):
                return Condition(JobState.LEFT)
            why = member.why or "its process was asked to end"
            return Condition(JobState.FAILED, f"{why}\n{self.tail()}")
        # What serves is kept, also when its scheduler has lost sight of it: the run notices
        # silence.
        if status is Status.SERVING:
            return Condition(JobState.SERVING)
        if not self.job.alive:
            return Condition(JobState.FAILED, f"its process has ended\n{self.tail()}")
        return Condition(JobState.STARTING)

    def end(self) -> None:
        job, self.job = self.job, None
        if job is None:
            return
        deadline = time.monotonic() + OWN_END_S
        while job.alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        job.stop()

    def tail(self) -> str:
        """Returns the end of the job's output, or the reason of its wait; empty without a job."""
        return "" if self.job is None else self.job.tail()


@dataclass
class RunMembers:
    """Lets members join a run, from `open` to `close`."""

    fleet: Fleet
    workers: Members | None
    """Members with workers; None if the run takes none."""
    launchers: dict[Kind, Launcher]
    """What starts members of a kind; without one they come by themselves."""
    settings: ServerSettings
    folder: Path
    server: RegistryServer | None = field(default=None, init=False)
    """Where they join; None before `open`."""
    launched: dict[Kind, LaunchedMembers] = field(default_factory=dict, init=False)

    @property
    def registry(self) -> Registry:
        """The members; from `open` on."""
        assert self.server is not None, "opened before"
        return self.server.registry

    def open(self, spec: JoinSpec, token: str, port: int) -> RegistryServer:
        """Opens the registry at `port` (0 for a free one), and admits the members without weights.

        Raises:
            ConfigError: The port is taken.
        """
        workers = self.workers
        terms = {} if workers is None else {Kind.WORKER: workers.terms}
        self.server = server = RegistryServer(
            Registry(spec), self.settings.endpoint, token=token, port=port, terms=terms
        )
        with best_effort("The address for joining members", self.folder):
            write_run_file(self.folder, server)
        for kind in (Kind.GENERATOR, *terms):
            launcher = self.launchers.get(kind)
            by_others = launcher is not None and not launcher.starts
            if by_others or not is_loopback(self.settings.host):
                rank_zero_info(
                    f"Other {kind}s join by: lrl join {server.elsewhere.url} --kind {kind}"
                )
        if workers is not None:
            admission = WorkerAdmission(workers, server.registry, token)
            self.fleet.run_in_background(poll_forever(admission.poll))
            self._launch(Kind.WORKER, server)
        return server

    def admit(self, of_nodes: int, interrupted: Callable[[], None]) -> None:
        """Admits generators from now on, and waits for the requested members.

        Args:
            of_nodes: Generators that the nodes of other ranks start.
            interrupted: Called at every look; raises to end the wait.

        Raises:
            ServerError: None of a launcher's has joined within `server.start_timeout_s`.
        """
        assert self.server is not None, "opened before"
        admission = GeneratorAdmission(self.fleet, self.registry, self.server.token, self.settings)
        self.fleet.run_in_background(poll_forever(admission.poll))
        self._launch(Kind.GENERATOR, self.server)
        if of_nodes:
            self.wait_joined(Kind.GENERATOR, of_nodes, interrupted)
        for kind, launcher in self.launchers.items():
            rank_zero_info(
                f"Waiting until {launcher.jobs} {kind}(s) of {type(launcher).__name__} have joined "
                f"at {self.server.elsewhere.url}."
            )
            self.wait_joined(kind, launcher.jobs, interrupted)

    def wait_joined(self, kind: Kind, wanted: int, interrupted: Callable[[], None]) -> None:
        """Waits until so many members have joined, for `server.start_timeout_s` at most; calls
        `interrupted`, which may raise, at every look.

        Raises:
            ServerError: A launcher was to start them, and none has joined by then, or each job has
                failed several times.
        """
        deadline_s = self.settings.start_timeout_s
        end = time.monotonic() + deadline_s
        while (joined := len(self.registry.joined(kind))) < wanted:
            interrupted()
            self.raise_if_all_failed()
            if time.monotonic() > end:
                if not joined and kind in self.launchers:
                    raise self._no_member_error(
                        kind, f"within server.start_timeout_s={deadline_s:g}"
                    )
                log.warning(
                    "Only %d of %d %ss have joined within server.start_timeout_s=%g; the run "
                    "begins. Their output says why.",
                    *(joined, wanted, kind, deadline_s),
                )
                return
            time.sleep(POLL_S)

    def raise_if_all_failed(self) -> None:
        """Raises ServerError if all jobs of a launcher have failed several times, and none
        serves."""
        for kind, launched in self.launched.items():
            if launched.fewest_failures >= ATTEMPTS and not self.registry.joined(kind):
                raise self._no_member_error(kind, f"in {ATTEMPTS} attempts")

    def close(self) -> None:
        """Announces the end of the run, ends the launchers' jobs, and closes the registry."""
        if self.server is not None:
            if self.workers is not None:
                self.workers.close()
            self.registry.end()
            for launched in self.launched.values():
                launched.stop()
            self.server.close()
            with best_effort("The end of the run", self.folder):
                remove_run_file(self.folder)

    def _launch(self, kind: Kind, server: RegistryServer) -> None:
        if (launcher := self.launchers.get(kind)) is None:
            return
        self.launched[kind] = LaunchedMembers(
            launcher,
            kind,
            server.registry,
            location=server.elsewhere,
            token=server.token,
            folder=self.folder,
        )
        self.launched[kind].start()

    def _no_member_error(self, kind: Kind, when: str) -> ServerError:
        launcher = self.launchers[kind]
        words = self.registry.refusal(kind) or self.launched[kind].last_words
        cause = f" The last one ended with:\n{words}" if words else ""
        name = f"{launcher.setting} {type(launcher).__name__}"
        return ServerError(f"{name}: no {kind} has joined {when}.{cause}")
