"""Looks for what a run may leave behind: processes, files in shared memory, temporary files."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

MARK = "LRL_TEST_MARK"


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def living(mark: str) -> list[psutil.Process]:
    """The processes that carry the mark in their environment: whatever was started, and by whom."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Body of a fixture: yields the mark that child processes carry, then waits until nothing of them is left."""
    mark, scratch = uuid.uuid4().hex, tempfile.mkdtemp()  # not under tmp_path, which is too long for vLLM's sockets
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", scratch)
    before = set(os.listdir("/dev/shm"))
    yield mark
    wait_for(lambda: not living(mark), 15.0, "the end of all processes")
    wait_for(lambda: set(os.listdir("/dev/shm")) <= before, 5.0, "an empty /dev/shm")
    wait_for(lambda: not os.listdir(scratch), 5.0, f"an empty temporary folder, not {os.listdir(scratch)}")
    os.rmdir(scratch)
