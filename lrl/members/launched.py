"""The members that a launcher starts: jobs that join the run, and are replaced when they fail."""

import contextlib
import os
import time
from pathlib import Path

from lrl.errors import NotRunning
from lrl.members.launchers import Job, Launcher
from lrl.members.registry import Kind, Registry, Status
from lrl.members.run_file import RUN_CERTIFICATE, RUN_TOKEN
from lrl.members.service import RunClient
from lrl.system.endpoint import Location
from lrl.system.job_supervisor import Condition, JobState, JobSupervisor, Slot

OWN_END_S = 20.0
"""Seconds in which a job must end by itself after the run has announced its end."""
POLL_S = 0.1


class LaunchedMembers(JobSupervisor):
    """Starts, watches, replaces and ends the jobs of a launcher.

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
        self.launcher = launcher
        self.kind = kind
        self.roster = roster
        self.folder = folder
        self.words = ["join", location.url, "--kind", str(kind)]
        # The token may be in no word of a command: every user of a machine can read those.
        variables = {RUN_TOKEN: token, RUN_CERTIFICATE: location.certificate}
        self.environment = {**os.environ, **variables}
        self.slots = [_LaunchedSlot(self, index) for index in range(launcher.jobs)]
        super().__init__(self.slots)

    @property
    def last_words(self) -> str:
        """The output of the job that failed last, or the resource that a job waits for."""
        return self.last_failure or next(filter(None, (slot.tail() for slot in self.slots)), "")


class _LaunchedSlot(Slot):
    """The slot of one job of a launcher."""

    def __init__(self, members: LaunchedMembers, index: int) -> None:
        self.members = members
        self.launcher = members.launcher
        self.kind = members.kind
        self.index = index
        self.name = str(self.kind)
        self._job: Job | None = None
        self._number = -1

    def start(self) -> None:
        members = self.members
        try:
            self._number = members.roster.claim(self.kind)
        except NotRunning as error:
            raise ConnectionError(str(error)) from error
        self.name = f"{self.kind} {self._number}"
        words = [*members.words, *self._own_words(), "--number", str(self._number)]
        self._job = self.launcher.start(
            f"{self.kind}-{self._number}",
            self.index,
            words=words,
            environment=members.environment,
            folder=members.folder,
        )

    def _own_words(self) -> list[str]:
        if not self.kind.has_weights:
            return [] if self.launcher.cores is None else ["--workers", str(self.launcher.cores)]
        devices = ",".join(map(str, self.launcher.devices(self.index)))
        return ["--devices", devices] if devices else []

    def condition(self) -> Condition:
        assert self._job is not None, "it was started"
        member = None
        # On another node: the run is gone, or does not answer now.
        with contextlib.suppress(NotRunning):
            member = self.members.roster.view(self.kind, self._number)
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
        deadline = time.monotonic() + OWN_END_S
        while job.alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        job.stop()

    def tail(self) -> str:
        """Returns the end of the job's output, or the reason of its wait; empty without a job."""
        job = self._job
        return "" if job is None else job.tail()
