"""Generators and reward hosts as steps of SLURM: within the allocation of the run's job, or each in its own."""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lrl.generators.launchers.base import Job, Launcher
from lrl.runtime.config_errors import ConfigError

END_S = 20.0
"""Seconds that a step has to end after each signal."""


class Slurm(Launcher):
    """Starts each job by `srun`, on one node.

    Within a job of SLURM these are steps of its allocation. Elsewhere srun asks for an allocation and waits for it, as
    long as `server.start_timeout_s` allows.

    Args:
        jobs: How many.
        options: More words for srun, such as `--partition=gpu`, `--exact`, `--cpus-per-task=16`. It asks for the GPUs
            of a generator (`server.tensor_parallel_size`) by itself.

    Raises:
        ConfigError: There are no jobs.
    """

    def __init__(self, jobs: int, options: list[str] | None = None) -> None:
        super().__init__(jobs)
        self.options = options or []

    def prepare(self, gpus: int, host: str, setting: str = Launcher.setting) -> None:
        """See `Launcher.prepare`."""
        super().prepare(gpus, host, setting)
        if shutil.which("srun") is None:
            raise ConfigError(
                f"{setting} is Slurm, and there is no srun on the path: start the run on a machine of a SLURM "
                "cluster, or leave the launcher out."
            )

    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Job:
        """See `Launcher.start`."""
        own = ["--nodes=1", "--ntasks=1", f"--job-name=lrl-{name}", "--export=ALL", "--unbuffered"]
        own += [f"--gpus={self.gpus}"] if self.gpus else []
        program = str(Path(sys.executable).with_name("lrl"))
        return _Step(["srun", *own, *self.options, program, *words], environment, folder / f"srun-{name}.log")


class _Step(Job):
    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        self.log_path = log_path
        with log_path.open("ab") as output:
            self._process = subprocess.Popen(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    @property
    def alive(self) -> bool:
        """See `Job.alive`."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the step by srun, which passes SIGTERM on; a second one has a generator end without leaving."""
        for end in (self._process.terminate, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                return

    def tail(self) -> str:
        """See `Job.tail`."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-20:])
