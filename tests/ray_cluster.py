"""A real Ray cluster: its head is here, its other nodes are in another network namespace."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.leftovers import MARK, living, wait_for, words
from tests.network_namespace import HERE, THERE, network_namespace

# Those of each process of tests are its own, by its pid: a second head found the first one at the
# same port, though at another address, and joined it.
PORT = 20_000 + 2 * (os.getpid() % 5_000)
ADDRESS = f"{HERE}:{PORT}"
START_S = 300.0
SETTINGS = {
    # Ray gives its workers a nice value of 15: a generator would get nothing of a busy machine.
    "RAY_worker_niceness": "0",
    # Ray looks for a lost head for 60 s, in which the run trains on.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
}
"""Ray's own, of the nodes and of those who use the cluster."""
ROOT = Path(__file__).parents[1]
"""The folder of `tests`, whose rewards the nodes import."""


class RayNode:
    """The processes of `ray start --block` on one node, and whatever its tasks start."""

    def __init__(self, prefix: Sequence[str], words: Sequence[str], log: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.log = log
        ray = str(Path(sys.executable).with_name("ray"))
        common = "--num-cpus 1 --object-store-memory 80000000 --disable-usage-stats --block"
        common += " --min-worker-port 0 --max-worker-port 0"  # any that are free
        path = f"{os.environ.get('PYTHONPATH', '')}:{ROOT}".lstrip(":")
        environment = os.environ | SETTINGS | {MARK: self.mark, "PYTHONPATH": path}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, ray, "start", *words, *common.split()],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=log.parent,
            )

    def has_started(self) -> bool:
        """Waits until it belongs to the cluster, or has ended."""

        def started() -> bool:
            return "Ray runtime started" in self.log.read_text()

        wait_for(lambda: started() or self.process.poll() is not None, START_S, "a node of Ray")
        return started()

    def processes(self, named: str = "") -> list[psutil.Process]:
        """Returns its living processes whose command has this word."""
        return [process for process in living(self.mark) if named in " ".join(words(process))]

    def kill(self, named: str = "") -> None:
        """Kills those processes."""
        for process in self.processes(named):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        """Kills all of its processes."""
        self.kill()
        self.process.wait(60)


class RayCluster:
    """A head here and, in another namespace, nodes with the resource `there`.

    Args:
        namespace: The name of that namespace.
        folder: For Ray's files; short, since Ray's sockets are in it.
    """

    def __init__(self, namespace: str, folder: Path) -> None:
        self.namespace = namespace
        self.folder = folder
        self.nodes: list[RayNode] = []
        own = f"--head --node-ip-address {HERE} --port {PORT} --include-dashboard false"
        own += f" --ray-client-server-port {PORT + 1}"
        self._start([], [*own.split(), "--temp-dir", str(self.folder)])

    def add_node(self) -> RayNode:
        """Starts one in the other namespace."""
        words = ["--address", ADDRESS, "--node-ip-address", THERE, "--resources", '{"there": 1}']
        return self._start(["ip", "netns", "exec", self.namespace], words)

    def _start(self, prefix: Sequence[str], words: Sequence[str]) -> RayNode:
        """Ray gives a node 30 s to start and no setting for more, so one on a busy machine has
        three attempts."""
        for _ in range(3):
            node = RayNode(prefix, words, self.folder / f"node-{len(self.nodes)}.log")
            self.nodes.append(node)
            if node.has_started():
                return node
            node.close()
        raise AssertionError(node.log.read_text())


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Yields one with its head alone."""
    with (
        network_namespace() as name,
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
    ):
        cluster = RayCluster(name, Path(folder))
        try:
            yield cluster
        finally:
            for node in cluster.nodes:
                node.close()
