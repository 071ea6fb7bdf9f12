"""A run's folder is locked while the run lives."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from lrl.checkpoints.run_folder import RunFolderLock


def test_a_live_runs_folder_is_an_error_that_names_its_process(tmp_path: Path) -> None:
    first, second = RunFolderLock(), RunFolderLock()
    first.acquire(tmp_path / "run")
    with pytest.raises(
        ValueError, match=rf"live run \(process {os.getpid()} on {socket.gethostname()}\)"
    ):
        second.acquire(tmp_path / "run")
    second.acquire(tmp_path / "another")
    first.release()
    second.acquire(tmp_path / "run")
    first.acquire(tmp_path / "another")


def test_a_killed_run_releases_its_folder(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    holder = os.fork()
    if not holder:
        claim = RunFolderLock()
        claim.acquire(tmp_path)
        os.write(writing, b"taken")
        signal.pause()
    assert os.read(reading, 5) == b"taken"
    with pytest.raises(ValueError, match=f"process {holder} on"):
        RunFolderLock().acquire(tmp_path)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    RunFolderLock().acquire(tmp_path)
