"""The guard of a command: whoever owned it and however that one ends, the command may save and
nothing is left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lrl.cli import ray_guard
from tests.leftovers import living, nothing_left, wait_for, words

DEADLINE_S = 60.0
RUNS = "import signal, subprocess, sys, time; from lrl.system.processes import unbind_from_parent\n"
SAVES = """
def save(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("saving", flush=True)
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, save)
print("runs", flush=True)
while True:
    time.sleep(0.1)
"""
LEAVES = "subprocess.Popen(['sleep', '600'], start_new_session=True); print('runs', flush=True)"
HANGS = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {LEAVES}; time.sleep(600)"
LIVES_ON = "unbind_from_parent(); print('runs', flush=True); time.sleep(600)"

mark = pytest.fixture(nothing_left)
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, mark: str) -> Iterator[Start]:
    """Starts a guard of some code."""
    started = []

    def run(
        code: str, grace_s: float = DEADLINE_S, program: str = ray_guard.__file__
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", program, str(grace_s), sys.executable, "-c", RUNS + code]
        with (tmp_path / "output").open("wb") as output:
            started.append(subprocess.Popen(command, stdout=output, stderr=output))
        wait_for(lambda: "runs" in text(tmp_path), DEADLINE_S, "the command")
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.wait()


@pytest.fixture
def impatient(tmp_path: Path) -> str:
    """A guard that does not wait for what its command leaves."""
    program = tmp_path / "impatient.py"
    program.write_text(
        "from lrl.cli import ray_guard; ray_guard.BEHIND_S = 0.5; raise "
        "SystemExit(ray_guard.main())"
    )
    return str(program)


def text(folder: Path) -> str:
    return (folder / "output").read_text()


def test_a_signal_reaches_the_command_whose_status_comes_back(start: Start, tmp_path: Path) -> None:
    guard = start(SAVES)
    guard.terminate()
    assert guard.wait(DEADLINE_S) == 128 + signal.SIGTERM
    assert text(tmp_path).split() == ["runs", "saving", "saved"]


@pytest.mark.parametrize("asked", [False, True])
def test_a_command_whose_owner_is_killed_may_save_and_is_asked_once(
    start: Start, tmp_path: Path, asked: bool
) -> None:
    guard = start(SAVES)
    if asked:
        guard.terminate()
        wait_for(lambda: "saving" in text(tmp_path), DEADLINE_S, "the first signal")
    guard.kill()
    wait_for(lambda: "saved" in text(tmp_path), DEADLINE_S, "what it saves")
    assert text(tmp_path).split() == ["runs", "saving", "saved"]


def test_a_command_that_does_not_end_is_killed_after_its_grace(
    start: Start, impatient: str, mark: str
) -> None:
    guard = start(HANGS, grace_s=0.5, program=impatient)
    assert living(mark)
    guard.kill()
    wait_for(lambda: not living(mark), DEADLINE_S, "its end")


def test_a_second_request_kills_all_that_the_command_has_started(
    start: Start, impatient: str
) -> None:
    guard = start(HANGS, program=impatient)
    guard.terminate()
    guard.send_signal(signal.SIGQUIT)
    assert guard.wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_what_a_command_leaves_is_killed(start: Start, impatient: str) -> None:
    assert start(LEAVES, program=impatient).wait(DEADLINE_S) == 0


def test_a_rank_that_has_met_the_others_still_dies_with_its_guard(start: Start, mark: str) -> None:
    outer = start(LIVES_ON)
    (guard,) = psutil.Process(outer.pid).children()
    assert ray_guard.__file__ in words(guard)
    guard.kill()
    wait_for(lambda: not living(mark), DEADLINE_S, "the command's end")
