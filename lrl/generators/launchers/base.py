"""The base of a launcher."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.runtime.config_errors import at_least


class Job(ABC):
    """A process that a launcher has started somewhere: `lrl serve --join` for a generator, `lrl score --join` for a
    reward host."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs or waits for its turn."""

    @abstractmethod
    def stop(self) -> None:
        """Ends it, also if it hangs; returns within a minute. Idempotent."""

    @abstractmethod
    def tail(self) -> str:
        """Returns the end of what it has printed, or what it waits for; for an error."""


class Launcher(ABC):
    """Starts jobs: generators as `strategy.launcher`, reward hosts as `data.reward_launcher`.

    Args:
        jobs: How many.

    Raises:
        ConfigError: There are none.
    """

    starts = True
    """Whether it starts something; otherwise whoever does needs the run's token from its user."""
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
        self.gpus, self.setting = gpus, setting

    def close(self) -> None:
        """Releases what it holds, after all jobs have been stopped. Idempotent."""
        return

    @abstractmethod
    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Job:
        """Starts a job.

        Args:
            name: Its name among those of the run, such as `generator-3`.
            words: The words after `lrl`.
            environment: Its variables; the run's token is among them, so they may not become words of a command.
            folder: The run's folder, for what the job prints.

        Raises:
            OSError: It cannot be started now.
        """
