"""The process of a model that scores: a vLLM server with a pooling model, under a supervisor, which
is started again when it ends."""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lrl.errors import ServerError
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.system.job_supervisor import Condition, JobState, JobSupervisor, Slot


class PoolingServer(Server):
    """One vLLM server of a sequence classifier, on loopback.

    Args:
        model: Folder or hub name of the model.
        settings: Settings of the server.
        devices: CUDA indices as the trainer counts them; empty for CPU.
        folder: The run's folder; the log is `<name>.log` in it, with hyphens.
        name: Its name in errors and logs.
    """

    def __init__(
        self, model: str, settings: ServerSettings, devices: list[int], folder: Path, name: str
    ) -> None:
        run_id = secrets.token_hex(4)  # of its own: only its files have that name
        super().__init__(
            model, settings, backend="", devices=devices, folder=folder, number=0, run_id=run_id
        )
        self._name = name
        self.log_path = Path(folder) / f"{name.replace(' ', '-')}.log"
        self._jobs = JobSupervisor([_ServerSlot(self)], running=True)

    @property
    def name(self) -> str:
        """Its name in errors and logs."""
        return self._name

    @property
    def layers(self) -> Sequence[str]:
        """Class paths of the routes that lrl adds: none."""
        return []

    def task_flags(self) -> dict[str, Any]:
        """Returns the flags of vLLM that only a server which scores has."""
        return {"runner": "pooling", "convert": "classify"}

    def environment(self) -> dict[str, str]:
        """Returns a generator's environment, without vLLM's routes for development."""
        found = super().environment()
        del found["VLLM_SERVER_DEV_MODE"]
        return found

    def open(self, interrupted: Callable[[], None] | None = None) -> None:
        """Starts the server, waits until it answers, and keeps it running until `close`.

        Args:
            interrupted: Called at every poll; raises to end the wait.

        Raises:
            ServerError: It has not started.
        """
        self.start()
        self.wait_ready(interrupted)
        self._jobs.start()

    def close(self) -> None:
        """Stops the server for good. May be called twice."""
        self._jobs.stop()


class _ServerSlot(Slot):
    """The slot of a server that answers."""

    def __init__(self, server: PoolingServer) -> None:
        self.server = server
        self.name = server.name
        self._answers = True

    def start(self) -> None:
        self._answers = False
        self.server.start()

    def condition(self) -> Condition:
        if self._answers and self.server.alive:
            return Condition(JobState.SERVING)
        try:
            self._answers = self.server.ready()
        except (ServerError, OSError) as error:
            return Condition(JobState.FAILED, str(error))
        return Condition(JobState.STARTING)

    def end(self) -> None:
        self.server.stop()
