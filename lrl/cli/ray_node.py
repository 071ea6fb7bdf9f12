"""One node of a run in a Ray cluster: an actor, which starts `lrl` there and hands on what it
prints.

Imports nothing of lrl, and is sent to the node by value: so it can say that lrl is missing there.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata, util
from pathlib import Path
from typing import Any

READ_S = 1.0
"""Longest wait of a call for something to read; other calls wait behind it."""
POLL_S = 0.1
CHUNK = 1 << 20
OTHERS = ("SLURM_", "PMI_", "OMPI_", "TORCHELASTIC_", "LSB_")
"""Beginnings of variables by which Lightning would take the process for one of another launcher."""
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE")


class RayNode:
    """The process of a run on this node."""

    def __init__(self) -> None:
        import ray

        self._address = ray.util.get_node_ip_address()
        # Bound and never listening: rank 0 can listen beside it, and the kernel gives the port to
        # nobody else.
        self._port = socket.socket(socket.AF_INET6 if ":" in self._address else socket.AF_INET)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((self._address, 0))
        # A pipe would break, and the run with it, at the end of this process.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the actor lives)
        self._guard, self._theirs = socket.socketpair()
        self._status: int | None = None

    def look(self) -> dict[str, Any]:
        """Returns the host's name, its address, a free port, and the versions on this node."""
        found = util.find_spec("lrl") is not None and program().exists()
        return {
            "host": socket.gethostname(),
            "address": self._address,
            "port": self._port.getsockname()[1],
            "versions": versions(metadata.version("lrl") if found else "missing"),
        }

    def start(
        self, words: list[str], variables: dict[str, str], folder: str, grace_s: float
    ) -> None:
        """Runs `lrl` with these words.

        Args:
            words: The words after `lrl`.
            variables: Of its environment.
            folder: The working folder, if this node has it; otherwise Ray's.
            grace_s: Seconds that it has to end when this actor is gone.
        """
        guard = [sys.executable, "-P", "-m", "lrl.cli.ray_guard", str(grace_s)]
        with self._theirs:
            starter = subprocess.Popen(
                [*guard, str(program()), *words],
                env=environment() | variables,
                cwd=folder if os.path.isdir(folder) else None,
                stdin=self._theirs.fileno(),
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
            starter.wait(60)
        self._guard.setblocking(False)

    def read(self, at: int) -> tuple[bytes, int | None]:
        """Returns what was printed from byte `at` on, and the exit status when all of it has been
        read."""
        end = time.monotonic() + READ_S
        while True:
            status = self._ended()
            if text := os.pread(self._output.fileno(), CHUNK, at):
                return text, None
            if status is not None or time.monotonic() > end:
                return b"", status
            time.sleep(POLL_S)

    def send(self, signum: int) -> None:
        """Sends a signal to `lrl`; SIGKILL ends all that it has started, too."""
        if self._ended() is None:
            self._guard.send(f"{signum}\n".encode())

    def _ended(self) -> int | None:
        """Returns the exit status of `lrl`, None while it runs."""
        if self._status is None:
            try:
                # Nothing is from a guard that was killed: the kernel has killed what it guarded.
                self._status = int(self._guard.recv(64) or 137)
            except BlockingIOError:  # it runs
                return None
            except OSError:
                self._status = 137
        return self._status


def versions(lrl: str) -> str:
    """Returns in words what must be the same on all nodes."""
    return f"Python {sys.version_info[0]}.{sys.version_info[1]}, lrl {lrl}"


def program() -> Path:
    """Returns the command `lrl` of this Python."""
    return Path(sys.executable).with_name("lrl")


def environment() -> dict[str, str]:
    """Returns the environment of `lrl`, without the variables of other launchers."""
    at_start = Path("/proc/self/environ").read_bytes()
    # Ray sets it later, to the CPU cores that were asked for: lrl would take it for the user's
    # choice.
    rays = () if b"OMP_NUM_THREADS=" in at_start else ("OMP_NUM_THREADS",)
    left_out = (*PLACES, *rays)
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OTHERS) and name not in left_out
    }
