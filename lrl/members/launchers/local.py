"""Generators as processes of this machine, which is a trainer node that rank 0 is not on."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.errors import ConfigError
from lrl.members.launchers.base import Job, Launcher, ProcessJob
from lrl.system.parent_death import bound_to_this_process


class Local(Launcher):
    """Starts one on each group of this machine's generator devices.

    It ends with the thread that has started it.

    Not a setting: rank 0's own generators are the fleet's, and the strategy gives this one to the
    other nodes.

    Args:
        placements: CUDA indices of each job; empty for one on a CPU.
    """

    def __init__(self, placements: Sequence[Sequence[int]]) -> None:
        super().__init__(len(placements))
        self.placements = placements

    def prepare(self, gpus: int, host: str, setting: str = Launcher.setting) -> None:
        """Raises ConfigError: it is no setting."""
        raise ConfigError(
            f"{setting} is Local, which a run uses by itself: leave it out, and set "
            "generator_devices."
        )

    def devices(self, index: int) -> Sequence[int]:
        return self.placements[index]

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> Job:
        program = str(Path(sys.executable).with_name("lrl"))
        return ProcessJob(bound_to_this_process([program, *words]), environment)
