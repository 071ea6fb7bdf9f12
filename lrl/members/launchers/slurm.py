"""Members as steps of SLURM: in the run's allocation, or each in its own."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.errors import ConfigError
from lrl.members.launchers.base import Job, Launcher, ProcessJob


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
        options = [
            "--nodes=1",
            "--ntasks=1",
            f"--job-name=lrl-{name}",
            "--export=ALL",
            "--unbuffered",
        ]
        options += [f"--gpus={self.gpus}"] if self.gpus else []
        program = str(Path(sys.executable).with_name("lrl"))
        return ProcessJob(
            ["srun", *options, *self.options, program, *words],
            environment,
            folder / f"srun-{name}.log",
        )
