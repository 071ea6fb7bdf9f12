"""Launchers start members away from the trainer, as jobs that are replaced when they fail.

A scheduler places; the processes join at rank 0. Without a launcher the run starts its generators
itself (`lrl.generators.server`), and scores and plays in processes of its own.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lrl.errors import ConfigError, NotRunning, above, at_least
from lrl.generators.fleet import Condition, JobState, JobSupervisor, Slot
from lrl.members.registry import (
    RUN_CERTIFICATE,
    RUN_TOKEN,
    Kind,
    Member,
    Registry,
    RunClient,
    Status,
)
from lrl.system.endpoint import Location
from lrl.system.processes import bound_to_this_process

__all__ = ["Command", "Given", "Job", "Launcher", "Ray", "Slurm"]

OWN_END_S = 20.0
"""Seconds in which a job must end by itself after the run has announced its end."""
END_S = 20.0
"""Seconds that a process has to end after each signal."""
POLL_S = 0.1
ATTEMPTS = 3
"""Jobs of each slot that may fail before a run gives up at its start."""
RAY_GRACE_S = 10.0
"""Seconds that a member has to leave when its node of Ray is lost: it may be the last one, which
stays."""


class Job:
    """A process here: `lrl join`, or what starts it elsewhere. It gets SIGTERM when the thread that
    has started it ends."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as output:
            self._process = subprocess.Popen(
                bound_to_this_process(words, signal.SIGTERM),
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            pipe.write(f"{environment.get(RUN_TOKEN, '')}\n".encode())  # ssh passes it on

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends it within a minute; the second SIGTERM has a member end without leaving. Idempotent."""
        for end in (self._process.terminate, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                return

    def tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])


class Launcher:
    """Starts jobs: generators as `strategy.launcher`, workers as `data.worker_launcher`.

    Args:
        jobs: How many.
    """

    starts = True
    """Whether it starts something; otherwise somebody does who has the run's token."""
    gpus = 0
    """GPUs of each job; a run sets it."""
    placements: Sequence[Sequence[int]] = ()
    """CUDA indices of each job, on a trainer node that rank 0 is not on."""
    cores: int | None = None
    """CPU cores of each job; None if the job can see by itself how many it may use."""

    def __init__(self, jobs: int) -> None:
        at_least(1, type(self).__name__, jobs=jobs)
        self.jobs = jobs

    def line(self) -> str:
        """Returns the command line of a job, with the places of `Command`."""
        return "{join}"

    def devices(self, index: int) -> Sequence[int]:
        """Returns the CUDA indices of job `index` among those that it sees; empty on a CPU."""
        return self.placements[index] if self.placements else range(self.gpus)

    def start(
        self,
        name: str,
        index: int,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
    ) -> Job:
        """Starts job `index`, whose output goes into a file of `folder`; raises OSError if it cannot
        be started now.

        `name` is its own in the run, such as `generator-3`; `words` stand after `lrl`. The
        environment has the run's token, so no words of a command may be made of it.
        """
        line = self.line()
        places = {"{join}": shlex.join(["lrl", *words]), "{name}": name, "{index}": str(index)}
        for place, value in places.items():
            line = line.replace(place, value)
        program, *own = shlex.split(line)
        # `lrl` is this Python's.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        if (found := shutil.which(program, path=path)) is None:
            raise FileNotFoundError(f"there is no {program} on the path")
        log = folder / f"{Path(program).name}-{name}.log"
        return Job([found, *own], {**environment, "PATH": path}, log)


class Given(Launcher):
    """Starts nothing: the run prints the command, and waits until so many have joined.

    Args:
        jobs: How many.
    """

    starts = False


class Command(Launcher):
    """Starts each job by a command, which it ends by SIGTERM.

    The command finds the run's token in its environment (`LRL_TOKEN`), and on its standard input,
    which `ssh HOST {join}` and `kubectl run NAME -i --image=IMAGE -- {join}` pass on.

    Args:
        jobs: How many.
        command: A command line; `{join}` in it stands for `lrl join` with its words, `{name}` for a
            name that no other job of the run has, `{index}` for the job's number from 0, which its
            replacement keeps.
    """

    def __init__(self, jobs: int, command: str) -> None:
        super().__init__(jobs)
        if "{join}" not in command:
            raise ConfigError(
                f"Command.command is {command!r}, and starts no member: put {{join}} where `lrl "
                "join` belongs."
            )
        try:
            shlex.split(command)
        except ValueError as error:
            raise ConfigError(f"Command.command is {command!r}: {error}.") from error
        self.command = command

    def line(self) -> str:
        return self.command


class Slurm(Launcher):
    """Starts each job by `srun`, on one node.

    Within a job of SLURM these are steps of its allocation. Elsewhere srun asks for an allocation
    and waits for it, as long as `server.start_timeout_s` allows.

    Args:
        jobs: How many.
        options: More words for srun, such as `--partition=gpu`, `--exact`, `--cpus-per-task=16`. It
            asks for the GPUs of a generator (`server.tensor_parallel_size`) by itself.
    """

    def __init__(self, jobs: int, options: list[str] | None = None) -> None:
        super().__init__(jobs)
        self.options = options or []

    def line(self) -> str:
        srun = ["srun", "--nodes=1", "--ntasks=1", "--export=ALL", "--unbuffered"]
        srun += [*([f"--gpus={self.gpus}"] if self.gpus else []), *self.options]
        return f"{shlex.join(srun)} --job-name=lrl-{{name}} {{join}}"


class Ray(Launcher):
    """Starts each job by `lrl ray`, as an actor of a Ray cluster.

    Needs `pip install lrl[ray]`, here and on each node.

    Args:
        jobs: How many.
        address: The cluster's, `host:port`; `auto` for the one that RAY_ADDRESS names or this
            machine belongs to.
        cpus: CPU cores of each, as Ray counts them; workers have a process for each. The GPUs of a
            generator are `server.tensor_parallel_size`, none on a CPU.
        resources: Ray's custom resources of each, such as `{"h100": 1}`.
    """

    def __init__(
        self,
        jobs: int,
        address: str = "auto",
        cpus: float = 1.0,
        resources: dict[str, float] | None = None,
    ) -> None:
        super().__init__(jobs)
        above(0, "Ray", cpus=cpus)
        self.address = address
        self.cpus = cpus
        self.resources = resources or {}
        self.cores = max(1, int(cpus))

    def line(self) -> str:
        words = ["lrl", "ray", "--gpus", str(self.gpus), "--cpus", str(self.cpus)]
        words += ["--resources", json.dumps(self.resources), "--address", self.address]
        return shlex.join([*words, "--grace_s", str(RAY_GRACE_S)]) + " {join}"


class LaunchedMembers(JobSupervisor):
    """Keeps the jobs of a launcher running, which join the run at `location`; `roster` is the registry
    there on rank 0, its client elsewhere."""

    slots: Sequence["_LaunchedSlot"]

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
        self.environment = {
            **os.environ,
            RUN_TOKEN: token,
            RUN_CERTIFICATE: location.certificate,
        }
        super().__init__(
            [_LaunchedSlot(self, index) for index in range(launcher.jobs * launcher.starts)]
        )

    @property
    def all_failed(self) -> bool:
        """Whether every job has failed several times since it last served for long."""
        return bool(self.slots) and all(slot.failures >= ATTEMPTS for slot in self.slots)

    @property
    def last_words(self) -> str:
        """The output of the job that failed last, or the resource that a job waits for."""
        last = max(self.slots, key=lambda slot: slot.failed_at, default=None)
        tails = (slot.tail() for slot in self.slots)
        return last.why if last and last.why else next(filter(None, tails), "")


@dataclass(eq=False)
class _LaunchedSlot(Slot):
    """The slot of one job of a launcher."""

    members: LaunchedMembers
    index: int
    job: Job | None = None
    number: int = -1

    def __post_init__(self) -> None:
        self.name = str(self.members.kind)

    def start(self) -> None:
        members, kind, launcher = self.members, self.members.kind, self.members.launcher
        try:
            self.number = members.roster.claim(kind=kind)
        except NotRunning as error:
            raise ConnectionError(str(error)) from error
        self.name = f"{kind} {self.number}"
        own: list[str] = []
        if kind is Kind.WORKER:
            own = [] if launcher.cores is None else ["--workers", str(launcher.cores)]
        elif devices := ",".join(map(str, launcher.devices(self.index))):
            own = ["--devices", devices]
        self.job = launcher.start(
            f"{kind}-{self.number}",
            self.index,
            words=[*members.words, *own, "--number", str(self.number)],
            environment=members.environment,
            folder=members.folder,
        )

    def condition(self) -> Condition:
        assert self.job is not None, "it was started"
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
        return "" if self.job is None else self.job.tail()
