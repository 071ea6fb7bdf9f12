"""The supervisor with a stand-in for vLLM: a small process tree with the same bad habits that
starts quickly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lrl.generators import supervisor
from tests.leftovers import lives, wait_for, wait_for_none

TREE = """
import mmap, os, signal, sys, tempfile, time
folder, shared = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_DFL)
with open(shared + ".new", "wb+") as file:
    file.write(bytes(4096)); file.flush()
    memory = mmap.mmap(file.fileno(), 4096)
os.link(file.name, shared); os.unlink(file.name)  # as glibc makes a semaphore
tempfile.mkstemp()
name = "root"
if os.fork() == 0:
    if os.fork() > 0:
        os._exit(0)  # the grandchild below loses its parent
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory.close()
    name = "orphan"
with open(os.path.join(folder, name + ".part"), "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, os.path.join(folder, name))
time.sleep(600)
"""
"""A root, and an orphan that left the session and ignores SIGTERM. The root maps a file in
/dev/shm."""

OWNER = """
import os, subprocess, sys, time
supervisor = subprocess.Popen([sys.argv[1], sys.argv[3], str(os.getpid()), *sys.argv[4:]], stdin=subprocess.PIPE)
if sys.argv[2] == "forks" and (copy := os.fork()) > 0:
    print(copy, flush=True)
time.sleep(600)
"""
"""A trainer that starts a supervisor; when it forks, a second process holds the pipe too."""


class Run:
    """A run in a test: its names, and the files that must not outlive it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scratch = folder / "scratch"
        self.scratch.mkdir(mode=0o700)
        self.shared = supervisor.SHM / f"psm_{uuid.uuid4().hex[:8]}"  # vLLM's file

    def command(self, owner: int) -> list[str]:
        """Returns the supervisor's command line."""
        program = (sys.executable, "-c", TREE, str(self.folder), str(self.shared))
        return [sys.executable, supervisor.__file__, str(owner), str(self.scratch), *program]

    def start(self) -> subprocess.Popen[bytes]:
        """Starts a supervisor owned by this test."""
        command = self.command(os.getpid())
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def tree(self) -> tuple[psutil.Process, psutil.Process]:
        """Returns the root and the orphan, once both have written their files."""
        wait_for(
            lambda: {"root", "orphan"} <= {path.name for path in self.folder.iterdir()},
            what="the tree",
        )
        root, orphan = (int((self.folder / name).read_text()) for name in ("root", "orphan"))
        return psutil.Process(root), psutil.Process(orphan)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.shared.unlink(missing_ok=True)


def assert_nothing_is_left(run: Run, tree: Sequence[psutil.Process]) -> None:
    def left() -> list[Any]:
        files = (run.shared, run.scratch)
        return [*filter(lives, tree), *(path for path in files if path.exists())]

    wait_for_none(left, 60.0, "the tree and its files")


def ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b".")
    process.stdin.close()


@pytest.mark.parametrize("end", ["asked", "SIGTERM to the supervisor", "SIGKILL to the root"])
def test_no_process_or_file_of_the_tree_is_left(end: str, run: Run) -> None:
    process = run.start()
    root, orphan = run.tree()
    if end == "asked":
        for ignored in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C, and a closed terminal
            process.send_signal(ignored)
        time.sleep(3 * supervisor.TICK_S)
        assert process.poll() is None and lives(root) and lives(orphan)
        ask_to_stop(process)
    elif end == "SIGTERM to the supervisor":
        process.terminate()
    else:
        time.sleep(2 * supervisor.SCAN_S)  # its shared memory is known only once it was looked at
        root.kill()
    process.wait(60)
    assert_nothing_is_left(run, (root, orphan))


@pytest.mark.parametrize("habit", ["plain", "forks"])
def test_a_killed_trainer_leaves_nothing(habit: str, run: Run) -> None:
    program = run.command(0)
    program.remove("0")
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, program[0], habit, *program[1:]], stdout=subprocess.PIPE
    )
    tree = run.tree()
    owner.kill()
    assert owner.stdout is not None
    assert_nothing_is_left(run, tree)
    if habit == "forks":
        os.kill(int(owner.stdout.readline()), signal.SIGKILL)


def test_the_root_ends_with_a_killed_supervisor_and_what_remains_can_be_cleared(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor.End.STOPPED, "_value_", 0.2)
    process = run.start()
    root, orphan = run.tree()
    process.kill()
    process.wait()
    wait_for(lambda: not lives(root), what="the end of the root")
    assert run.scratch.is_dir(), "no process removes the temporary folder"
    supervisor.clear(str(run.scratch))
    assert not lives(orphan) and not run.scratch.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_what_another_user_has_put_there_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor, "SHM", tmp_path)
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    for file in (theirs, own):
        file.touch()
    os.chown(theirs, 65534, 65534)
    supervisor.remove_shared({theirs.stat().st_ino, own.stat().st_ino})
    assert theirs.exists() and not own.exists()


def test_shared_memory_that_others_still_use_stays(run: Run) -> None:
    process = run.start()
    run.tree()[1].kill()  # it would take its whole grace time
    program = (
        "import mmap, sys, time; f = open(sys.argv[1], 'rb+')\n"
        "m = mmap.mmap(f.fileno(), 0); print(flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", program, str(run.shared)]
    other = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    ask_to_stop(process)
    process.wait(60)
    assert run.shared.exists()
    other.kill()
    other.wait()
