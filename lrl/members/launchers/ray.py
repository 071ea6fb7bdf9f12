"""Members as tasks of a Ray cluster, on any of its nodes."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from lrl.errors import ConfigError
from lrl.members.launchers.base import Job, Launcher
from lrl.system.config_errors import above, one_of
from lrl.system.endpoint import is_loopback

PlacementGroup = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
DRIVER = Path(__file__).with_name("ray_driver.py")
REACH_S = 10.0
"""Seconds for a connection to the port of the cluster's head."""
CONNECT_S = 90.0
"""Seconds until the driver belongs to the cluster; most of them for imports on a busy machine."""
STOP_S = 50.0
"""Seconds for the end of a task; the driver reports it lost before."""
TRAVEL = ("LRL_", "VLLM_", "HF_", "NCCL_", "GLOO_")
"""Beginnings of the variables that a task gets from here. The others are its node's own."""


class Ray(Launcher):
    """Starts each job as a task of a Ray cluster, in a placement group.

    Needs `pip install lrl[ray]`, here and lrl on each node.

    Args:
        jobs: How many.
        address: The cluster's, `host:port`; `auto` for the one that RAY_ADDRESS names or this
            machine belongs to.
        cpus: CPU cores of each, as Ray counts them; workers have a process for each. The GPUs of a
            generator are `server.tensor_parallel_size`, none on a CPU.
        resources: Ray's custom resources of each, such as `{"h100": 1}`.
        placement_group: Ray's strategy: `PACK` (few nodes), `SPREAD` (many), `STRICT_SPREAD` (one
            job a node), `STRICT_PACK` (one node).

    Raises:
        ConfigError: There are no jobs, or a number is not above 0.
    """

    def __init__(
        self,
        jobs: int,
        address: str = "auto",
        cpus: float = 1.0,
        resources: dict[str, float] | None = None,
        placement_group: PlacementGroup = "PACK",
    ) -> None:
        super().__init__(jobs)
        above(0, "Ray", cpus=cpus)
        one_of("Ray", placement_group=(get_args(PlacementGroup), placement_group))
        for name, amount in (resources or {}).items():
            above(0, "Ray.resources", **{name: amount})
        self.address = address
        self.cpus = cpus
        self.resources = resources or {}
        self.placement_group = placement_group
        self.cores = max(1, int(cpus))
        self._driver: _Driver | None = None
        # Each job is started on a thread of its own. Behind a lost head two of them made a driver
        # each, and the bundles of the second had no place beside those of the first.
        self._connecting = threading.Lock()

    def prepare(self, gpus: int, host: str, setting: str = Launcher.setting) -> None:
        """See `Launcher.prepare`. Connects to the cluster, and stays connected."""
        super().prepare(gpus, host, setting)
        if find_spec("ray") is None:
            raise ConfigError(
                f"{setting} is Ray, and the package ray is not installed: pip install lrl[ray]."
            )
        try:
            driver = self._connected()
        except OSError as error:
            raise ConfigError(
                f"{setting}.address is {self.address}, and there is no connection to a Ray "
                f"cluster: start one here (ray start --head), or give its address. {error}"
            ) from error
        if driver.nodes > 1 and is_loopback(host):
            raise ConfigError(
                f"strategy.server.host is {host}, which the other nodes of the Ray cluster "
                f"({driver.nodes} in all) do not reach: give this machine's address in their "
                "network."
            )

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> Job:
        variables = {key: value for key, value in environment.items() if key.startswith(TRAVEL)}
        return self._connected().start(name, words, variables)

    def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def _connected(self) -> "_Driver":
        """Returns the driver, or a new one where Ray has ended it with the head of the cluster;
        raises OSError."""
        # As many jobs as there are would else wait one after the other for a head that is lost.
        if not self._connecting.acquire(timeout=CONNECT_S):
            raise ConnectionError(f"Ray has not answered another job for {CONNECT_S:g} s")
        try:
            if self._driver is None or not self._driver.alive:
                self._driver = self._connect()
            return self._driver
        finally:
            self._connecting.release()

    def _connect(self) -> "_Driver":
        """Returns a new driver; raises OSError."""
        resources = {"CPU": self.cpus, "GPU": float(self.gpus), **self.resources}
        bundles = [{name: amount for name, amount in resources.items() if amount}] * self.jobs
        words = [
            "--address",
            self.address,
            "--bundles",
            json.dumps(bundles),
            "--strategy",
            self.placement_group,
        ]
        check_reachable(self.address)
        driver = _Driver(words)
        if not driver.connected.wait(CONNECT_S) or not driver.nodes:
            driver.kill()
            raise ConnectionError(f"Ray says: {driver.last_words()}")
        return driver


def check_reachable(address: str) -> None:
    """Raises OSError if nobody listens at `host:port`: Ray would try for a minute, and speak of its
    own parts."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()


class _Driver:
    """The process of `ray_driver.py`, and a thread that reads its reports."""

    def __init__(self, words: Sequence[str]) -> None:
        self.connected = threading.Event()
        """Set when it is connected, and when it has ended."""
        self.nodes = 0
        self.waits = ""
        """The resources that its tasks wait for."""
        self._jobs: dict[str, _Task] = {}
        self._over = False
        self._output: list[str] = []
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(DRIVER), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for the trainer
        )
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def start(self, name: str, words: Sequence[str], variables: Mapping[str, str]) -> "_Task":
        """Starts a task; raises OSError if the driver has just ended."""
        job = _Task(self, name)
        with self._lock:
            if self._over:
                raise ConnectionError("the connection to Ray is lost")
            self._jobs[name] = job
        self.order(start=name, words=[*words], variables={**variables})
        return job

    def order(self, **fields: Any) -> None:
        """Sends an order."""
        assert self._process.stdin is not None, "it is a pipe"
        with self._lock:
            if self._process.stdin.closed:
                raise ConnectionError("the connection to Ray is closed")
            self._process.stdin.write(json.dumps(fields) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends it, and with it all tasks."""
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Ends it at once; Ray ends its tasks."""
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        """Returns the end of Ray's output."""
        return "\n".join(self._output[-5:]) or "nothing"

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            match _report_in(line):
                case {"nodes": int(nodes)}:
                    self.nodes = nodes
                    self.connected.set()
                case {"waits": str(waits)}:
                    self.waits = waits
                case {"ended": str(name), "said": str(said)} if name in self._jobs:
                    self._jobs.pop(name).end(said)
                case _ if line.strip():  # Ray's own
                    self._output = [*self._output[-20:], line.rstrip()]
        with self._lock:
            self._over = True  # nobody would end a task that is started from now on
        for job in self._jobs.values():
            job.end(f"the connection to Ray is lost. {self.last_words()}")
        self.connected.set()


def _report_in(line: str) -> Any:
    """Returns the report in a line of the driver; None for one that Ray wrote, which may begin as a
    report does."""
    try:
        return json.loads(line)
    except ValueError:
        return None


class _Task(Job):
    def __init__(self, driver: _Driver, name: str) -> None:
        self._driver = driver
        self._name = name
        self._ended = threading.Event()
        self._output = ""

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def end(self, output: str) -> None:
        """Notes that it has ended."""
        self._output = output
        self._ended.set()

    def stop(self) -> None:
        if self.alive:
            with contextlib.suppress(OSError):  # the driver has ended, and Ray ends its tasks
                self._driver.order(stop=self._name)
            self._ended.wait(STOP_S)

    def tail(self) -> str:
        return self._output or self._driver.waits
