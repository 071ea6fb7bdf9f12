"""Launchers start members away from the trainer, as jobs that are replaced when they fail
(`lrl.members.launched`).

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
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.errors import ConfigError, above, at_least
from lrl.members.registry import RUN_TOKEN
from lrl.system.processes import bound_to_this_process

__all__ = ["Command", "Given", "Job", "Launcher", "Ray", "Slurm"]

END_S = 20.0
"""Seconds that a process has to end after each signal."""
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
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self.status is None

    def stop(self, end_s: float = END_S) -> None:
        """Signals it and what it has started, three times at most, and waits `end_s` seconds each time
        for its own end; the second SIGTERM has a member end without leaving. Idempotent."""
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.alive:
                os.killpg(self._process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(end_s)
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
    cores: int | None = None
    """CPU cores of each job; None if the job can see by itself how many it may use."""

    def __init__(self, jobs: int) -> None:
        at_least(1, type(self).__name__, jobs=jobs)
        self.jobs = jobs

    def line(self) -> str:
        """Returns the command line of a job, with the places of `Command`."""
        return "{join}"

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
