"""The process of a model that scores: a vLLM server with a pooling model, under a supervisor, which
is started again when it ends."""

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lrl.errors import ServerError
from lrl.generators.server import POLL_S, Server
from lrl.generators.settings import ServerSettings

log = logging.getLogger(__name__)

MOST_FAILED_STARTS = 3
"""Starts in a row that may fail; then the server stays down."""


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
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None
        self.restarts = 0
        """Times that it was started again."""

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
        self._keeper = threading.Thread(target=self._keep, name=self.name, daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """Stops the server for good. May be called twice."""
        self._ended.set()
        if self._keeper is not None:
            self._keeper.join()
        self.stop()

    def _keep(self) -> None:
        failed = 0
        while not self._ended.wait(POLL_S):
            if self.alive:
                continue
            log.warning("The server of %s has ended: it is started again.", self.name)
            self.restarts += 1
            try:
                self._restart()
                failed = 0
            except (ServerError, OSError) as error:
                failed += 1
                log.warning("%s", error)
            if failed == MOST_FAILED_STARTS:
                log.error("The server of %s stays down: %d starts failed.", self.name, failed)
                return

    def _restart(self) -> None:
        """Starts the server and waits until it answers, or until `close`."""
        self.stop()  # removes what is left of the one that has ended
        self.start()
        while not self._ended.is_set() and not self.ready():
            self._ended.wait(POLL_S)
