"""The guard of a command: whoever owned it and however that one ends, the command may save and
nothing is left.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lrl.cli import ray_guard
from tests.leftovers import living, nothing_left, wait_for, words

DEADLINE_S = 60.0
SAVES = """
import signal, sys, time
def save(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("saving", flush=True)
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
print("runs", flush=True)
while True:
    time.sleep(0.1)
"""
HANGS = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('runs', "
    "flush=True); time.sleep(600)"
)
LIVES_ON = """
from lrl.system.processes import unbind_from_parent
import time
unbind_from_parent()
print("runs", flush=True)
time.sleep(600)
"""
LEAVES = (
    "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); print('runs', "
    "flush=True)"
)

mark = pytest.fixture(nothing_left)
Start = Callable[..., socket.socket]


@pytest.fixture
def start(tmp_path: Path, mark: str) -> Iterator[Start]:
    """Starts a guard of some code; gives its owner's end of the socket."""
    owners = []

    def run(
        code: str, grace_s: float = DEADLINE_S, program: str = ray_guard.__file__
    ) -> socket.socket:
        owner, theirs = socket.socketpair()
        owner.settimeout(DEADLINE_S)
        owners.append(owner)
        command = [
            sys.executable,
            "-P",
            program,
            str(grace_s),
            sys.executable,
            "-c",
            code,
        ]
        with theirs, (tmp_path / "output").open("wb") as output:
            subprocess.run(
                command, stdin=theirs, stdout=output, stderr=output, check=True, timeout=DEADLINE_S
            )
        wait_for(lambda: "runs" in text(tmp_path), DEADLINE_S, "the command")
        return owner

    yield run
    for owner in owners:
        owner.close()


def text(folder: Path) -> str:
    return (folder / "output").read_text()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_command_whose_status_comes_back(
    start: Start, tmp_path: Path, signum: int
) -> None:
    owner = start(SAVES)
    owner.send(f"{int(signum)}\n".encode())
    assert int(owner.recv(64)) == 128 + signum
    assert text(tmp_path).split() == ["runs", "saving", "saved"]


@pytest.mark.parametrize("asked", [False, True])
def test_a_command_whose_owner_is_gone_may_save_and_is_asked_once(
    start: Start, tmp_path: Path, asked: bool
) -> None:
    owner = start(SAVES)
    if asked:
        owner.send(b"15\n")
        wait_for(lambda: "saving" in text(tmp_path), DEADLINE_S, "the first signal")
    owner.close()
    wait_for(lambda: "saved" in text(tmp_path), DEADLINE_S, "what it saves")
    assert text(tmp_path).split() == ["runs", "saving", "saved"]


def test_a_command_that_does_not_end_is_killed_after_its_grace(start: Start, mark: str) -> None:
    owner = start(HANGS, grace_s=0.5)
    assert living(mark)
    owner.close()
    wait_for(lambda: not living(mark), DEADLINE_S, "its end")


def test_sigkill_is_for_all_that_the_command_has_started(start: Start) -> None:
    owner = start(
        "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True);"
        + HANGS
    )
    owner.send(b"9\n")
    assert int(owner.recv(64)) == 128 + signal.SIGKILL


def test_what_a_command_leaves_is_killed(start: Start, tmp_path: Path) -> None:
    program = tmp_path / "impatient.py"
    program.write_text(
        "from lrl.cli import ray_guard; ray_guard.BEHIND_S = 0.5; raise "
        "SystemExit(ray_guard.main())"
    )
    assert int(start(LEAVES, program=str(program)).recv(64)) == 0


def test_a_rank_that_has_met_the_others_still_dies_with_its_guard(start: Start, mark: str) -> None:
    owner = start(LIVES_ON)
    (guard,) = (one for one in living(mark) if ray_guard.__file__ in words(one))
    os.kill(guard.pid, signal.SIGKILL)
    assert owner.recv(64) == b""
    wait_for(lambda: not living(mark), DEADLINE_S, "the command's end")
