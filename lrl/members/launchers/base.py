"""The base of a launcher."""

import contextlib
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.system.config_errors import at_least

END_S = 20.0
"""Seconds that a process has to end after each signal."""


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
    """Starts jobs: generators as `strategy.launcher`, scorers as `data.reward_launcher`,
    environments as `data.environment_launcher`.

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
