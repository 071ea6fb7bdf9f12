"""Members that somebody else starts: another scheduler, or a person."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.members.launchers.base import Job, Launcher


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
