"""One generator as a process: start it, wait until it answers, stop it.

A generator is a stock vLLM server. This file knows its command line, its environment and its log; the supervisor ends
it, whichever way the trainer ends.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from lrl.generators import cpu_backend, supervisor
from lrl.generators.auth import TOKEN_VARIABLE
from lrl.generators.endpoint import connect
from lrl.generators.log_cause import cause
from lrl.generators.response_stream import STREAM_INTERVAL
from lrl.generators.settings import ServerSettings, as_flags, dashed
from lrl.runtime.config_errors import ConfigError

log = logging.getLogger(__name__)

POLL_S = 0.1

TRAINER_ONLY = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables that place a process in the trainer's world, beside MASTER_* and TORCHELASTIC_*; vLLM would obey them."""


class ServerError(RuntimeError):
    """A generator did not start; the message has its exit status, the cause as its log tells it, and the log's path."""

    shown_alone = True


class Server:
    """One vLLM server with its supervisor.

    Args:
        model: Folder or hub name of the model.
        settings: How generators are run.
        backend: vLLM's name of the weight-transfer engine.
        devices: CUDA indices as the trainer counts them, `settings.tensor_parallel_size` of them; empty for CPU.
        folder: The run's folder; the log is `generator-<number>.log` in it.
        number: Number of the generator in the fleet.
        run_id: Name of the run. Files in /dev/shm that begin with `lrl-<run_id>-` are removed when the trainer is gone.
        token: Opens the generator's routes (`lrl.generators.auth`); None makes one.
        transport_environment: Variables that the transport needs (`Transport.server_environment`).

    Raises:
        ValueError: If there are not as many devices as the tensor-parallel size, one is not visible to the trainer, or
            `settings.host` is not an address of this machine.
    """

    def __init__(
        self,
        model: str,
        settings: ServerSettings,
        backend: str,
        devices: list[int],
        folder: Path,
        number: int,
        run_id: str,
        token: str | None = None,
        transport_environment: Mapping[str, str] | None = None,
    ) -> None:
        if devices and len(devices) != settings.tensor_parallel_size:
            size = settings.tensor_parallel_size
            raise ConfigError(f"Generator {number} has the devices {devices}, but tensor_parallel_size={size}.")
        self.model, self.settings, self.backend = model, settings, backend
        self.number, self.run_id, self.transport_environment = number, run_id, transport_environment or {}
        self.token = token or secrets.token_urlsafe(32)
        self.log_path = Path(folder) / f"generator-{number}.log"
        self._on_cpu, self._visible = not devices, _visible_devices(devices)
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._deadline, self._log_start = 0.0, 0
        settings.listening.warn()
        self.trust = settings.listening.trust()
        self._reservation = settings.listening.reserve_port()
        self.port: int = self._reservation.getsockname()[1]

    @property
    def name(self) -> str:
        """What errors and logs call it."""
        return f"generator {self.number}"

    @property
    def url(self) -> str:
        """Where the generator answers."""
        return self.settings.listening.url(self.port)

    @property
    def alive(self) -> bool:
        """Whether the process runs; it may still be starting."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Those of vLLM, all of which are there when it answers."""
        return psutil.Process(self._supervisor.pid).children(recursive=True) if self._supervisor is not None else []

    def start(self) -> None:
        """Start the supervisor, which starts vLLM, and return at once. `start_timeout_s` begins to run."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        keep = ["-P", supervisor.__file__, "--owner", str(os.getpid()), "--prefix", f"lrl-{self.run_id}-", "--"]
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            self._supervisor = subprocess.Popen(
                [*(cpu_backend.words() if self._on_cpu else ()), sys.executable, *keep, *self.command()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=self.environment(),
                start_new_session=True,
            )
        self._deadline = time.monotonic() + self.settings.start_timeout_s
        log.info("%s starts at %s; its log is %s", self.name, self.url, self.log_path)

    def wait_ready(self, interrupted: Callable[[], None] | None = None) -> None:
        """Wait until the generator answers.

        Args:
            interrupted: Called at every look; it raises to end the wait.

        Raises:
            ServerError: If it ended, or `start_timeout_s` passed since `start`; it is stopped then.
        """
        while not self.ready():
            if interrupted is not None:
                interrupted()
            time.sleep(POLL_S)

    def ready(self) -> bool:
        """Whether the generator answers; see `wait_ready` for the errors."""
        if not self.alive:
            raise self._error(
                f"ended with exit status {self._supervisor.returncode}" if self._supervisor else "does not run"
            )
        if self._healthy():
            return True
        if time.monotonic() > self._deadline:
            self.stop()
            raise self._error(f"did not answer within start_timeout_s={self.settings.start_timeout_s:g}; stopped")
        return False

    def stop(self) -> None:
        """End the generator and wait until no process of it is left. Does nothing when it does not run."""
        running, self._supervisor = self._supervisor, None
        if running is None or running.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError), running.stdin as pipe:
            pipe.write(b".")
        try:
            running.wait(self.settings.stop_timeout_s)
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop within stop_timeout_s=%g; killing it", self.name, self.settings.stop_timeout_s)
            process = psutil.Process(running.pid)
            supervisor.kill([*process.children(recursive=True), process])
            running.wait()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the log since the last start; empty before the first."""
        return "\n".join(self._log().splitlines()[-lines:])

    def _log(self) -> str:
        if self._supervisor is None and not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def command(self) -> list[str]:
        """vLLM's command line."""
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *as_flags(self._flags())]

    def _flags(self) -> dict[str, Any]:
        """Flags of vLLM: what lrl relies on, the settings, and the user's own."""
        settings = self.settings
        flags: dict[str, Any] = {
            "model": self.model,
            "port": self.port,
            **settings.listening.flags(),
            "enable-scale-out": True,
            "middleware": "lrl.generators.auth.Guard",
            "weight-transfer-config": {"backend": self.backend},
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "scheduling-policy": "priority",
            "stream-interval": STREAM_INTERVAL,
            "disable-uvicorn-access-log": True,
            "max-model-len": settings.max_model_len,
            "max-num-seqs": settings.max_num_seqs,
            "dtype": settings.dtype,
            "tensor-parallel-size": settings.tensor_parallel_size,
        }
        if settings.enforce_eager:
            flags["enforce-eager"] = True
        flags |= (
            cpu_backend.flags(settings) if self._on_cpu else {"gpu-memory-utilization": settings.gpu_memory_utilization}
        )
        return flags | {dashed(name): value for name, value in settings.extra_args.items()}

    def environment(self) -> dict[str, str]:
        """The trainer's environment without its place in the trainer's world, with what vLLM needs."""
        apart = {name for name in os.environ if name.startswith(("MASTER_", "TORCHELASTIC_"))} | set(TRAINER_ONLY)
        environment = {name: value for name, value in os.environ.items() if name not in apart}
        environment |= self.transport_environment
        if self._on_cpu:
            environment |= cpu_backend.environment(self.settings, environment)
        return environment | {
            TOKEN_VARIABLE: self.token,
            # One machine holds the whole generator; gloo would listen, open to all, wherever the host's name leads.
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "lrl",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "CUDA_VISIBLE_DEVICES": self._visible,
        }

    def _healthy(self) -> bool:
        """Whether /health responses 200."""
        connection = connect(self.url, self.trust, timeout_s=2.0)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        return False

    def _error(self, what: str) -> ServerError:
        if found := cause(self._log()):
            return ServerError(f"{self.name.capitalize()} {what}:\n{found}\nIts whole log is {self.log_path}.")
        return ServerError(f"{self.name.capitalize()} {what}. The end of {self.log_path}:\n{self.log_tail()}")


def _visible_devices(devices: list[int]) -> str:
    """CUDA_VISIBLE_DEVICES for `devices`, whose indices count within the trainer's own CUDA_VISIBLE_DEVICES."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    if own is None:
        return ",".join(map(str, devices))
    names = own.split(",")
    if beyond := [index for index in devices if index >= len(names)]:
        raise ConfigError(f"Generator devices {beyond} are not among CUDA_VISIBLE_DEVICES={own!r}: give fewer devices.")
    return ",".join(names[index] for index in devices)
