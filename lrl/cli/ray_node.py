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
        # A pipe would break, and the run with it, at the end of this process.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the actor lives)
        self._port: socket.socket | None = None
        self._guard: socket.socket | None = None
        self._status: int | None = None

    def look(self) -> dict[str, Any]:
        """Returns what the others need to know of this node."""
        import ray

        address = ray.util.get_node_ip_address()
        if self._port is None:
            # Bound and never listening: rank 0 can listen beside it, and the kernel gives the port
            # to nobody else.
            self._port = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind((address, 0))
        versions = {"python": ".".join(map(str, sys.version_info[:2]))}
        if Path(sys.executable).with_name("lrl").exists() and util.find_spec("lrl"):
            versions["lrl"] = metadata.version("lrl")
        return {
            "host": socket.gethostname(),
            "address": address,
            "port": self._port.getsockname()[1],
            "versions": versions,
        }

    def start(
        self, words: list[str], variables: dict[str, str], folder: str, grace_s: float
    ) -> None:
        """Runs `lrl` with these words, in `folder` if this node has it.

        Args:
            words: The words after `lrl`.
            variables: Of its environment.
            folder: The working folder, if this node has it; otherwise Ray's.
            grace_s: Seconds that it has to end when this actor is gone.
        """
        package = util.find_spec("lrl")
        assert package is not None and package.origin is not None, "looked for before"
        guard = str(Path(package.origin).parent / "cli" / "ray_guard.py")
        program = str(Path(sys.executable).with_name("lrl"))
        self._guard, theirs = socket.socketpair()
        with theirs:
            starter = subprocess.Popen(
                [sys.executable, "-P", guard, "--grace_s", str(grace_s), "--", program, *words],
                env=environment() | variables,
                cwd=folder if os.path.isdir(folder) else None,
                stdin=theirs.fileno(),
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
        if self._guard is not None and self._ended() is None:
            self._guard.send(f"{signum}\n".encode())

    def _ended(self) -> int | None:
        """Returns the exit status of `lrl`, None while it runs."""
        if self._status is None and self._guard is not None:
            try:
                said = self._guard.recv(64)
                # Its guard was killed, and the kernel has killed it.
                self._status = int(said) if said else 137
            except BlockingIOError:
                pass
            except OSError:
                self._status = 137
        return self._status


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
