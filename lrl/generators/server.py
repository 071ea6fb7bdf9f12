"""The process of one generator: a stock vLLM server under a supervisor.

This file knows vLLM's command line, environment and log. The supervisor ends the server when the
trainer ends.
"""

import contextlib
import http.client
import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from numpy.random import SeedSequence

from lrl.errors import ConfigError, ServerError
from lrl.generators import supervisor
from lrl.generators.settings import (
    NICE,
    SPARE_SLOTS,
    ServerSettings,
    as_flags,
    cpu_environment,
    cpu_flags,
    dashed,
)
from lrl.system.auth import TOKEN_VARIABLE
from lrl.system.endpoint import Location, connect
from lrl.system.machine import trainer_has_all_cores

log = logging.getLogger(__name__)

POLL_S = 0.1
LONGEST_TEMPORARY = 107 - len("/lrl-xxxxxxxx/") - 36
"""A Unix socket's path has at most 107 characters, and vLLM names its sockets by a UUID of 36. The
temporary folder of a cluster can be longer."""

SEED_VARIABLE = "PL_GLOBAL_SEED"
"""Lightning's `seed_everything` sets it."""
TRAINER_ONLY = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)
"""Variables of the trainer's process group, besides MASTER_* and TORCHELASTIC_*, which vLLM would
obey, and those of its allocator: in expandable segments vLLM's all-reduce fails (vllm#42609)."""

LOG_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:\w+ \S+ \S+ \[[^\]]*\] )?")
"""Of each line of a process of vLLM, and of each logged line."""
ERROR = re.compile(r"^[\w.]*(?:Error|Exception)(?:: |$)")
POINTS_AT_ANOTHER = re.compile(r"see (?:the )?(?:root cause|stack ?trace)", re.IGNORECASE)
LAST_LINES = 20


@dataclass(eq=False, repr=False)
class Server:
    """One vLLM server with its supervisor; raises ConfigError if the number of devices is not the
    tensor-parallel size, or `settings.host` is not an address of this machine."""

    model: str
    """Folder or hub name."""
    settings: ServerSettings
    backend: str
    """vLLM's name of the weight-transfer engine."""
    devices: Sequence[int]
    """CUDA indices as the trainer counts them; empty for CPU."""
    folder: Path
    """The run's; the log is `generator-<number>.log` in it."""
    number: int
    """In the fleet."""
    token: str = ""
    """That callers need (`lrl.system.auth`); empty makes one."""
    transport_environment: Mapping[str, str] = field(default_factory=dict)
    """See `Transport.server_environment` and `common_environment`."""
    middleware: Sequence[str] = ()
    """See `Transport.middleware`; the token guards it."""
    seed: int = 0
    """The run's (`run_seed`); the generator's follows from it."""
    _supervisor: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _deadline: float = field(init=False, default=0.0)
    _log_start: int = field(init=False, default=0)
    _scratch: str = field(init=False, default="")
    _starts: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        size = self.settings.tensor_parallel_size
        if self.devices and len(self.devices) != size:
            raise ConfigError(
                f"Generator {self.number} has devices {self.devices} for {size} processes."
            )
        self.token = self.token or secrets.token_urlsafe(32)
        self.log_path = Path(self.folder) / f"generator-{self.number}.log"
        self._visible = _visible_devices(self.devices)
        self._reservation = self.settings.reserve_port()
        self.port: int = self._reservation.getsockname()[1]
        self.name = f"generator {self.number}"
        self.location = self.settings.location(self.port)
        self.url = self.location.url

    @property
    def alive(self) -> bool:
        """Whether it runs; it may still be starting."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Returns vLLM's processes; complete once the server is ready."""
        if self._supervisor is None:
            return []
        return psutil.Process(self._supervisor.pid).children(recursive=True)

    def start(self) -> None:
        """Starts the supervisor, which starts vLLM, and returns at once."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch = make_scratch()
        command = [
            *(() if self.devices or trainer_has_all_cores() else NICE),
            *(sys.executable, "-P", supervisor.__file__, str(os.getpid()), self._scratch),
            *self.command(),
        ]
        self._starts += 1
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            self._supervisor = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env=self.environment(),
                start_new_session=True,
            )
        self._deadline = time.monotonic() + self.settings.start_timeout_s
        log.info("%s starts at %s; its log is %s", self.name, self.url, self.log_path)

    def wait_ready(self, interrupted: Callable[[], None] = lambda: None) -> None:
        """Waits until the generator answers; calls `interrupted` at every poll, which may raise.
        ServerError: it ended, or was stopped at `start_timeout_s` since `start`."""
        while not self.ready():
            interrupted()
            time.sleep(POLL_S)

    def ready(self) -> bool:
        """Whether the generator answers; see `wait_ready` for the errors."""
        if self._supervisor is None:
            raise self.error("does not run")
        if not self.alive:
            raise self.error(f"ended with exit status {self._supervisor.returncode}")
        connection = connect(self.location, timeout_s=2.0)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return True
        if time.monotonic() > self._deadline:
            self.stop()
            raise self.error(
                f"did not answer within start_timeout_s={self.settings.start_timeout_s:g}; stopped"
            )
        return False

    def stop(self) -> None:
        """Ends the generator and waits until nothing of it is left, also when somebody has killed
        its supervisor; idempotent."""
        running, self._supervisor = self._supervisor, None
        if running is None or running.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError), running.stdin as pipe:
            pipe.write(b".")
        limit_s = self.settings.stop_timeout_s
        try:
            running.wait(limit_s)
        except subprocess.TimeoutExpired:
            log.warning("%s did not stop within stop_timeout_s=%g; killing it", self.name, limit_s)
            running.kill()
        if running.wait() < 0:
            supervisor.clear(self._scratch)

    def log_tail(self) -> str:
        """Returns the `end_of` its log since the last start; empty before the first."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return end_of(file.read().decode(errors="replace"))

    def command(self) -> list[str]:
        """Returns vLLM's command line."""
        settings = self.settings
        flags: dict[str, Any] = {
            "model": self.model,
            "port": self.port,
            "host": settings.host,
            # Absolute, for readers of the command line.
            "ssl-certfile": settings.tls_cert and os.path.abspath(settings.tls_cert),
            "ssl-keyfile": settings.tls_key and os.path.abspath(settings.tls_key),
            "disable-uvicorn-access-log": True,
            "max-model-len": settings.max_model_len,
            "max-num-seqs": settings.max_num_seqs + SPARE_SLOTS,
            "dtype": settings.dtype,
            "tensor-parallel-size": settings.tensor_parallel_size,
            "enforce-eager": settings.enforce_eager or None,
            "enable-scale-out": True,
            "weight-transfer-config": {"backend": self.backend},
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "scheduling-policy": "priority",
            "seed": mixed_seed(self.seed, self.number, self._starts),
            "quantization": settings.quantization,
            "tool-call-parser": settings.tool_parser,
            "enable-auto-tool-choice": settings.tool_parser is not None or None,
        }
        gpu = {"gpu-memory-utilization": settings.gpu_memory_utilization}
        flags |= gpu if self.devices else cpu_flags(settings)
        flags |= {dashed(name): value for name, value in settings.extra_args.items()}
        # vLLM puts each middleware around those before it: the token's guards them all.
        first, last = "lrl.vllm_plugin.write_route.WriteRoute", "lrl.system.auth.TokenMiddleware"
        layers = [first, *self.middleware, last]
        around = [word for layer in layers for word in ("--middleware", layer)]
        # -P: the server imports nothing from the current folder, where a user may have a `lrl` or a
        # `random.py`.
        return [sys.executable, "-P", "-m", "lrl.vllm_plugin.plugin", *around, *as_flags(flags)]

    def environment(self) -> dict[str, str]:
        """Returns the trainer's environment with vLLM's, without what is the trainer's alone."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in TRAINER_ONLY and not name.startswith(("MASTER_", "TORCHELASTIC_"))
        }
        environment |= self.transport_environment
        if not self.devices:
            environment |= cpu_environment(self.settings, environment)
        return environment | {
            TOKEN_VARIABLE: self.token,
            # The whole generator is on one machine; gloo would listen, open to all, on the address
            # of the host's name.
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "lrl",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "CUDA_VISIBLE_DEVICES": self._visible,
        }

    def error(self, event: str) -> ServerError:
        """Returns the error of what has happened to it, with the end of its log."""
        end = f"The end of {self.log_path}:\n{self.log_tail()}"
        return ServerError(f"{self.name.capitalize()} {event}. {end}")


@dataclass(eq=False)
class JoinedServer:
    """A vLLM server that another process has started."""

    number: int
    location: Location
    token: str
    settings: ServerSettings
    alive: bool = True
    """Whether its process had a lease at the last poll of the registry."""

    def __post_init__(self) -> None:
        self.name = f"generator {self.number}"
        self.url = self.location.url

    def log_tail(self) -> str:
        return ""  # its own process has its log


def run_seed(steps_done: int) -> int:
    """Returns the generators' seed of a run that resumes after `steps_done` optimizer steps: the
    same seed would draw the numbers of its first steps again."""
    return mixed_seed(int(os.environ.get(SEED_VARIABLE, "0")), steps_done)


def mixed_seed(*parts: int) -> int:
    """Returns the seed, below 2^31, of a run and a step, or of a run, a generator's number and its
    earlier starts: vLLM seeds every server with 0, and two wrote equal responses to one prompt."""
    # Not their sum: with it generator 1 of a run with seed 0 draws what generator 0 of a run with
    # seed 1 draws.
    return int(SeedSequence(parts).generate_state(1)[0]) >> 1


def _visible_devices(devices: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for `devices`, indices within the trainer's own."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return ",".join(map(str, devices))
    names = visible.split(",")
    return ",".join(names[index] for index in devices)


def end_of(log: str) -> str:
    """Returns the last lines of a log, below the last error that points at no other one if that
    stands further up: a server writes many lines about an engine that has died."""
    lines = log.splitlines()
    last = lines[-LAST_LINES:]
    for number in range(len(lines) - 1, -1, -1):
        line = LOG_PREFIX.sub("", lines[number])
        if ERROR.match(line) and not POINTS_AT_ANOTHER.search(line):
            further_up = number < len(lines) - len(last)
            return "\n".join([line, "...", *last] if further_up else last)
    return "\n".join(last)


def make_scratch() -> str:
    """Makes a folder for one generator: vLLM leaves sockets and compiler files behind."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="lrl-", dir=usual if len(usual) <= LONGEST_TEMPORARY else "/tmp")
