"""The base of a launcher."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.runtime.config_errors import at_least


class Job(ABC):
    """A process that a launcher has started somewhere: `lrl serve --join` for one generator."""

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
    """Starts generators.

    Args:
        generators: How many.

    Raises:
        ConfigError: There are none.
    """

    starts = True
    """Whether it starts something; otherwise whoever does needs the run's token from its user."""
    gpus = 0
    """GPUs of each generator."""

    def __init__(self, generators: int) -> None:
        at_least(1, "strategy.launcher", generators=generators)
        self.generators = generators

    def prepare(self, gpus: int, host: str) -> None:
        """Raises ConfigError if it cannot work here; called before anything starts.

        Args:
            gpus: GPUs of each generator; 0 for generators on a CPU.
            host: The address at which the run listens.
        """
        self.gpus = gpus

    def close(self) -> None:
        """Releases what it holds, after all jobs have been stopped. Idempotent."""
        return

    @abstractmethod
    def start(self, number: int, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Job:
        """Starts a generator.

        Args:
            number: The generator's number.
            words: The words after `lrl`.
            environment: Its variables; the run's token is among them, so they may not become words of a command.
            folder: The run's folder, for what the job prints.

        Raises:
            OSError: It cannot be started now.
        """
