"""Looks for what a run may leave behind: processes, files in shared memory, temporary files.

Other tests, with servers of their own, run beside the one that looks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from lrl.generators.supervisor import SHM, mapped

MARK = "LRL_TEST_MARK"


def wait_for(
    condition: Callable[[], object], timeout_s: float = 60.0, what: str = "the other side"
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)


def wait_for_none(left: Callable[[], Iterable[object]], timeout_s: float, what: str) -> None:
    """Waits until `left` returns nothing; else fails with what it returned last."""
    deadline = time.monotonic() + timeout_s
    while found := list(left()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for the end of {what}: {found}"
        time.sleep(0.2)


def living(mark: str) -> list[psutil.Process]:
    """The processes that carry the mark in their environment: whatever was started, and by whom."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for pid in psutil.pids():
        # Read here: psutil takes three times as long, and tests that wait look at all processes
        # many times.
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if (
                wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                and pid != os.getpid()
            ):
                found.append(psutil.Process(pid))
    return [process for process in found if lives(process)]


def others_living(mark: str) -> list[list[str]]:
    """Command lines of `living`, without the resource tracker, which is of this process."""
    found = [text for process in living(mark) if (text := words(process))]
    return [text for text in found if "resource_tracker" not in " ".join(text)]


def every_process() -> Iterator[psutil.Process]:
    """psutil.process_iter remembers processes by their pid: of a pid that is used again, its next
    two calls miss the new process, and the kernel begins again after 32,768 pids, which a few
    sessions of tests use up."""
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def words(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended, also since somebody found it."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def engines(supervisor: psutil.Process) -> list[psutil.Process]:
    """The engines of a server, which are its children.

    Not those with an engine's title: it has none if vLLM has set the variable that was the first of
    its environment.
    """
    try:
        return [engine for server in supervisor.children() for engine in server.children()]
    except psutil.NoSuchProcess:
        return []


def lives(process: psutil.Process) -> bool:
    """Whether it runs; it may end between two looks at it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_in_shared_memory(before: set[str]) -> set[str]:
    """New files there that no process has mapped. Semaphores are Python's, whose tracker removes
    those of a killed process when its own ends, which may be that of a test beside this one."""
    used = mapped(psutil.pids())
    new = [
        entry for entry in os.scandir(SHM) if entry.name not in before and entry.inode() not in used
    ]
    return {entry.name for entry in new if not entry.name.startswith("sem.")}


def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Body of a fixture: yields the mark that child processes carry, then waits until nothing of
    them is left."""
    # Not under tmp_path, which is too long for vLLM's sockets.
    mark, scratch = uuid.uuid4().hex, tempfile.mkdtemp()
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", scratch)
    # Of this process, which may have looked already.
    monkeypatch.setattr(tempfile, "tempdir", scratch)
    before = set(os.listdir(SHM))
    yield mark
    wait_for_none(lambda: living(mark), 60.0, "its processes")
    wait_for_none(lambda: left_in_shared_memory(before), 60.0, "its files in shared memory")
    wait_for_none(lambda: os.listdir(scratch), 60.0, "its temporary files")
    os.rmdir(scratch)
