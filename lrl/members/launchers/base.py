"""What a launcher is, and the launchers whose jobs are processes: nobody's, this machine's, and
SLURM's."""

import contextlib
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.errors import ConfigError
from lrl.system.config_errors import at_least
from lrl.system.processes import bound_to_this_process

END_S = 20.0
"""Seconds that a process has to end after each signal."""
PROGRAM = str(Path(sys.executable).with_name("lrl"))


class Job(ABC):
    """A process that a launcher has started somewhere: `lrl join`."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs or waits for its turn."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it, also if it hangs; returns within a minute. Idempotent."""

    @abstractmethod
    def tail(self) -> str:
        """Returns the end of its output, or the reason of its wait, for an error."""


class ProcessJob(Job):
    """A job that is a process of this machine, or has one here that stands for it.

    Args:
        words: Its command.
        environment: Its variables.
        log_path: Where its output goes; None for that of this process.
    """

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], log_path: Path | None = None
    ) -> None:
        self.log_path = log_path
        with contextlib.nullcontext() if log_path is None else log_path.open("ab") as output:
            self._process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the trainer
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the process by SIGTERM; a second one has a member end without leaving."""
        for end in (self._process.terminate, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                return

    def tail(self) -> str:
        if self.log_path is None:
            status = self._process.poll()
            return "Its own words are above " + (
                "(it runs)." if status is None else f"(status {status})."
            )
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])


class Launcher(ABC):
    """Starts jobs: generators as `strategy.launcher`, workers as `data.reward_launcher` or
    `data.environment_launcher`.

    Args:
        jobs: How many.

    Raises:
        ConfigError: There are none.
    """

    starts = True
    """Whether it starts something; otherwise the run's user passes the run's token to the
    starter."""
    gpus = 0
    """GPUs of each job."""
    cores: int | None = None
    """CPU cores of each job; None if the job can see by itself how many it may use."""
    setting = "strategy.launcher"
    """The setting that it is the value of, for errors."""

    def __init__(self, jobs: int) -> None:
        at_least(1, type(self).__name__, jobs=jobs)
        self.jobs = jobs

    def prepare(self, gpus: int, host: str, setting: str = setting) -> None:
        """Raises ConfigError if it cannot work here; called before anything starts.

        Args:
            gpus: GPUs of each job; 0 for none.
            host: The address at which the run listens.
            setting: The setting that it is the value of.
        """
        self.gpus = gpus
        self.setting = setting

    def devices(self, index: int) -> Sequence[int]:
        """Returns the CUDA indices of a job among those that it sees; empty on a CPU.

        Args:
            index: Which of the `jobs`, from 0.
        """
        return range(self.gpus)

    def close(self) -> None:
        """Releases its resources, after all jobs have been stopped. Idempotent."""
        return

    @abstractmethod
    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> Job:
        """Starts a job.

        Args:
            name: Its name among those of the run, such as `generator-3`.
            words: The words after `lrl`.
            environment: Its variables; the run's token is among them, so they may not become words
                of a command.
            folder: The run's folder, for what the job prints.

        Raises:
            OSError: It cannot be started now.
        """


class Given(Launcher):
    """Starts nothing: the run prints the command, and waits until so many have joined.

    Args:
        jobs: How many.
    """

    starts = False

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> Job:
        return _SomebodyElsesJob()


class _SomebodyElsesJob(Job):
    alive = True

    def stop(self) -> None:
        """It ends with the run by itself."""

    def tail(self) -> str:
        return ""


class Local(Launcher):
    """Starts one on each group of this machine's generator devices. It ends with the thread that has
    started it.

    The strategy gives it to the trainer nodes that rank 0 is not on: rank 0's own generators are
    the fleet's.

    Args:
        placements: CUDA indices of each job; empty for one on a CPU.
    """

    def __init__(self, placements: Sequence[Sequence[int]]) -> None:
        super().__init__(len(placements))
        self.placements = placements

    def devices(self, index: int) -> Sequence[int]:
        return self.placements[index]

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> Job:
        return ProcessJob(bound_to_this_process([PROGRAM, *words]), environment)


class Slurm(Launcher):
    """Starts each job by `srun`, on one node.

    Within a job of SLURM these are steps of its allocation. Elsewhere srun asks for an allocation
    and waits for it, as long as `server.start_timeout_s` allows.

    Args:
        jobs: How many.
        options: More words for srun, such as `--partition=gpu`, `--exact`, `--cpus-per-task=16`. It
            asks for the GPUs of a generator (`server.tensor_parallel_size`) by itself.

    Raises:
        ConfigError: There are no jobs.
    """

    def __init__(self, jobs: int, options: list[str] | None = None) -> None:
        super().__init__(jobs)
        self.options = options or []

    def prepare(self, gpus: int, host: str, setting: str = Launcher.setting) -> None:
        super().prepare(gpus, host, setting)
        if shutil.which("srun") is None:
            raise ConfigError(
                f"{setting} is Slurm, and there is no srun on the path: start the run on a machine "
                "of a SLURM cluster, or leave the launcher out."
            )

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> Job:
        srun = ["srun", "--nodes=1", "--ntasks=1", f"--job-name=lrl-{name}", "--export=ALL"]
        srun += ["--unbuffered", *([f"--gpus={self.gpus}"] if self.gpus else []), *self.options]
        return ProcessJob([*srun, PROGRAM, *words], environment, folder / f"srun-{name}.log")
