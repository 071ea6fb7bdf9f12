"""No process outlives a start of a real vLLM server that is cut off or fails.

How one ends that has started is in the tests of whole runs (`tests/strategies/test_shutdown.py`).

Covers lrl/generators/server.py, supervisor.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from lrl.errors import ServerError
from lrl.generators import supervisor
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from tests.leftovers import MARK, lives, living, wait_for

BACKEND = "nccl"
"""Any engine that vLLM knows: no weights move here."""
SETTINGS: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "kv_cache_gib": 0.1,
    "dtype": "float32",
    "start_timeout_s": 180.0,
}
OWNER = """
import json, sys, time
from pathlib import Path
from lrl.generators import supervisor
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
model, folder, settings = sys.argv[1:]
server = Server(model, ServerSettings(**json.loads(settings)), "nccl", [], Path(folder), 0, "ends")
server.start()
print(server._supervisor.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """The value of a variable that every process started by the test inherits."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(MARK, value)
    return value


@dataclass
class Seen:
    """Processes and shared memory of a generator while it lived."""

    processes: list[psutil.Process] = field(default_factory=list)
    shared: set[int] = field(default_factory=set)

    def look(self, supervisor_pid: int) -> int:
        """Records them; returns the number of processes."""
        self.processes = [
            psutil.Process(supervisor_pid),
            *psutil.Process(supervisor_pid).children(recursive=True),
        ]
        self.shared = supervisor.mapped(process.pid for process in self.processes)
        return len(self.processes)


@pytest.fixture(autouse=True)
def seen(mark: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Fails a test that leaves a process, shared memory or a temporary file."""
    scratch = tempfile.mkdtemp()  # not under tmp_path, which is too long for vLLM's sockets
    monkeypatch.setenv("TMPDIR", scratch)
    # Of this process, which may have looked already.
    monkeypatch.setattr(tempfile, "tempdir", scratch)
    seen = Seen()
    yield seen
    wait_for(
        lambda: not [*filter(lives, seen.processes), *living(mark)],
        180.0,
        "the end of all processes",
    )
    wait_for(
        lambda: not seen.shared & inodes(supervisor.SHM), 180.0, "the removal of the shared memory"
    )
    wait_for(lambda: not os.listdir(scratch), 180.0, "an empty temporary folder")
    os.rmdir(scratch)


def inodes(folder: Path) -> set[int]:
    return {entry.inode() for entry in os.scandir(folder)}


def test_a_trainer_killed_while_its_generator_starts_leaves_nothing(
    policy_folder: Path, tmp_path: Path, seen: Seen
) -> None:
    """The kill comes as soon as the engine's own process exists."""
    words = [str(policy_folder), str(tmp_path), json.dumps(SETTINGS)]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *words], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    try:
        pid = int(owner.stdout.readline())
        wait_for(lambda: seen.look(pid) >= 3, 300.0, "the engine's process")
    finally:
        owner.kill()
        owner.wait()


def failure(model: Path, folder: Path, **settings: Any) -> str:
    """Returns the error of a server that cannot start."""
    server = Server(str(model), ServerSettings(**settings), BACKEND, [], folder, 0, "ends")
    server.start()
    try:
        with pytest.raises(ServerError, match=r"status 1. The end of .*generator-0.log") as caught:
            server.wait_ready()
    finally:
        server.stop()
    return str(caught.value)


def test_a_failing_generators_error_quotes_the_cause(policy_folder: Path, tmp_path: Path) -> None:
    message = failure(policy_folder, tmp_path, max_model_len=64, kv_cache_gib=1e-6, threads=1)
    assert "memory for the cache blocks" in message
