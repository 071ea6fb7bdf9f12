"""The jobs of a launcher: each is a member of the run, and is replaced when it fails."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lrl.errors import NotRunning
from lrl.generators.fleet import Condition, JobState, JobSupervisor, SupervisedJob
from lrl.members.launchers import Job, Launcher
from lrl.members.registry import (
    RUN_CERTIFICATE,
    RUN_TOKEN,
    Kind,
    Member,
    Registry,
    RunClient,
    Status,
)

OWN_END_S = 20.0
"""Seconds in which a job must end by itself after the run has announced its end."""
POLL_S = 0.1
ATTEMPTS = 3
"""Failures of each job before a run gives up at its start."""


class LaunchedMembers(JobSupervisor):
    """Keeps the jobs of a launcher running, which join the run that `client` reaches.

    On rank 0 `registry` is asked instead. `placements` has the CUDA indices of each job, by default
    the first ones that it sees.
    """

    jobs: Sequence["_LaunchedJob"]

    def __init__(
        self,
        launcher: Launcher,
        kind: Kind,
        client: RunClient,
        folder: Path,
        registry: Registry | None = None,
        placements: Sequence[Sequence[int]] = (),
    ) -> None:
        self.launcher = launcher
        self.kind = kind
        self.roster = registry or client
        self.folder = folder
        self.words = ["join", client.location.url, "--kind", str(kind)]
        # The token may be in no word of a command: every user of a machine can read those.
        own = {RUN_TOKEN: client.token, RUN_CERTIFICATE: client.location.certificate}
        self.environment = {**os.environ, **own}
        placements = placements or [range(launcher.gpus)] * launcher.jobs
        jobs = [_LaunchedJob(self, *place) for place in enumerate(placements)]
        super().__init__(jobs if launcher.starts else [])

    @property
    def all_failed(self) -> bool:
        """Whether every job has failed several times since it last served for long."""
        return bool(self.jobs) and all(job.failures >= ATTEMPTS for job in self.jobs)

    @property
    def last_words(self) -> str:
        """The output of the job that failed last, or the resource that a job waits for."""
        last = max(self.jobs, key=lambda job: job.failed_at, default=None)
        tails = (job.tail() for job in self.jobs)
        return last.why if last and last.why else next(filter(None, tails), "")


@dataclass(eq=False)
class _LaunchedJob(SupervisedJob):
    """A job of a launcher; each attempt is a member of its own."""

    members: LaunchedMembers
    index: int
    devices: Sequence[int]
    attempt: Job | None = None
    number: int = -1

    def __post_init__(self) -> None:
        self.name = str(self.members.kind)

    def start(self) -> None:
        members, kind, launcher = self.members, self.members.kind, self.members.launcher
        self.number = members.roster.claim(kind=kind)
        self.name = f"{kind} {self.number}"
        own: list[str] = []
        if kind is Kind.WORKER:
            own = [] if launcher.cores is None else ["--workers", str(launcher.cores)]
        elif self.devices:
            own = ["--devices", ",".join(map(str, self.devices))]
        self.attempt = launcher.start(
            f"{kind}-{self.number}",
            self.index,
            words=[*members.words, *own, "--number", str(self.number)],
            environment=members.environment,
            folder=members.folder,
        )

    def condition(self) -> Condition:
        assert self.attempt is not None, "it was started"
        kind = self.members.kind
        try:
            member = self.members.roster.view(kind=kind, number=self.number)
        except NotRunning:  # on another node: the run is gone, or does not answer now
            member = Member(kind, self.number)
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
        if not self.attempt.alive:
            return Condition(JobState.FAILED, f"its process has ended\n{self.tail()}")
        return Condition(JobState.STARTING)

    def end(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return
        deadline = time.monotonic() + OWN_END_S
        while attempt.alive and time.monotonic() < deadline:
            time.sleep(POLL_S)
        attempt.stop()

    def tail(self) -> str:
        return "" if self.attempt is None else self.attempt.tail()
