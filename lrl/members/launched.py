"""The members that a launcher starts: jobs that join the run, and are replaced when they fail."""

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lrl.errors import NotRunning
from lrl.members.client import RunClient
from lrl.members.launchers import Job, Launcher
from lrl.members.member import Kind, Status
from lrl.members.registry import Registry
from lrl.members.run_file import RUN_CERTIFICATE, RUN_TOKEN, url_elsewhere
from lrl.members.service import RegistryServer
from lrl.system.endpoint import Location
from lrl.system.job_supervisor import Condition, JobState, JobSupervisor, Slot

OWN_END_S = 20.0
"""Seconds in which a job must end by itself after the run has announced its end."""
POLL_S = 0.1


class RunAddress(NamedTuple):
    """The URL and the token with which a process of another machine joins a run."""

    location: Location
    token: str

    @classmethod
    def of(cls, server: RegistryServer) -> "RunAddress":
        """Returns the address of a run's registry."""
        return cls(replace(server.location(), url=url_elsewhere(server)), server.token)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a job that joins there; the token is in no word of a command."""
        variables = {RUN_TOKEN: self.token, RUN_CERTIFICATE: self.location.certificate}
        return {**os.environ, **variables}


Roster = Registry | RunClient
"""The joined members: the registry on rank 0, or its client elsewhere."""


class LaunchedMembers:
    """Starts, watches, replaces and ends the jobs of a launcher.

    Args:
        launcher: What starts them.
        kind: What they are.
        roster: Where they join.
        address: Its address for them.
        folder: The run's folder.
    """

    def __init__(
        self, launcher: Launcher, kind: Kind, roster: Roster, address: RunAddress, folder: Path
    ) -> None:
        self.launcher = launcher
        self.kind = kind
        self.slots = [
            _LaunchedSlot(self, roster, address, folder=folder, index=index)
            for index in range(launcher.jobs)
        ]
        self.supervisor = JobSupervisor(self.slots)

    def start(self) -> None:
        """Begins to start them."""
        self.supervisor.start()

    def stop(self) -> None:
        """Ends all jobs that do not end by themselves after the run has announced its end."""
        self.supervisor.stop()

    @property
    def last_words(self) -> str:
        """The output of the job that failed last, or the resource that a job waits for."""
        return self.supervisor.last_failure or next(
            filter(None, (slot.tail() for slot in self.slots)), ""
        )


class _LaunchedSlot(Slot):
    """The slot of one job of a launcher."""

    def __init__(
        self,
        members: LaunchedMembers,
        roster: Roster,
        address: RunAddress,
        folder: Path,
        index: int,
    ) -> None:
        self.launcher = members.launcher
        self.kind = members.kind
        self.roster = roster
        self.folder = folder
        self.words = ["join", address.location.url, "--kind", str(self.kind)]
        self.words += self._own_words(index)
        self.environment = address.environment
        self.name = str(self.kind)
        self._job: Job | None = None
        self._number = -1

    def _own_words(self, index: int) -> list[str]:
        if not self.kind.has_weights:
            return [] if self.launcher.cores is None else ["--workers", str(self.launcher.cores)]
        devices = ",".join(map(str, self.launcher.devices(index)))
        return ["--devices", devices] if devices else []

    def start(self) -> None:
        try:
            self._number = self.roster.claim(self.kind)
        except NotRunning as error:
            raise ConnectionError(str(error)) from error
        self.name = f"{self.kind} {self._number}"
        words = [*self.words, "--number", str(self._number)]
        self._job = self.launcher.start(
            f"{self.kind}-{self._number}", words, self.environment, self.folder
        )

    def condition(self) -> Condition:
        assert self._job is not None, "it was started"
        member = None
        # On another node: the run is gone, or does not answer now.
        with contextlib.suppress(OSError, NotRunning):
            member = self.roster.view(self.kind, self._number)
        if member is not None and member.status.over:
            if member.status is Status.ENDED or (
                member.status is Status.LEFT and not member.by_itself
            ):
                return Condition(JobState.LEFT)
            why = member.why or "its process was asked to end"
            return Condition(JobState.FAILED, f"{why}\n{self._job.tail()}")
        # What serves is kept, also when its scheduler has lost sight of it: the run notices
        # silence.
        if member is not None and member.status is Status.SERVING:
            return Condition(JobState.SERVING)
        if not self._job.alive:
            return Condition(JobState.FAILED, f"its process has ended\n{self._job.tail()}")
        return Condition(JobState.STARTING)

    def end(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        deadline = time.monotonic() + (OWN_END_S if self.launcher.starts else 0.0)
        while job.alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        job.stop()

    def tail(self) -> str:
        """Returns the end of the job's output, or the reason of its wait; empty without a job."""
        job = self._job
        return "" if job is None else job.tail()
