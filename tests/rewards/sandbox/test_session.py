"""A sandbox that does not work is refused or an error, and so is a program that is ended from outside:
neither is a 0.

Covers lrl/rewards/sandbox/runner.py.
"""

import itertools
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

import psutil
import pytest

from lrl.errors import ConfigError
from lrl.rewards.sandbox import session
from tests.leftovers import wait_for
from tests.rewards.bubblewrap_here import needs_bubblewrap
from tests.rewards.test_code import ASSERTS, DOUBLE, PAIRS, code

bubblewrapped = {"isolation": "bubblewrap"}


@pytest.fixture(autouse=True)
def nothing_is_known_to_work():
    session.check.cache_clear()
    yield
    session.check.cache_clear()


def fake_bwrap(monkeypatch, folder, text):
    """Puts a bwrap on PATH that all users may run."""
    folder.chmod(0o755)
    file = folder / "bwrap"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755 if text else 0o644)
    monkeypatch.setenv("PATH", str(folder))


@pytest.fixture
def open_folder():
    """A folder that the sandbox's user can reach, as pytest's is not."""
    with TemporaryDirectory(prefix="lrl") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "sudo apt-get install bubblewrap.*isolation: none"),
        ("echo bwrap: No permissions to create new namespace >&2; exit 1", "No permissions"),
        ("exit 3", "status 3"),
    ],
)
def test_a_bwrap_that_does_not_work_is_refused_with_its_own_words(
    text, words, monkeypatch, open_folder
):
    fake_bwrap(monkeypatch, open_folder, text)
    with pytest.raises(ConfigError, match=words):
        code(**bubblewrapped)


@needs_bubblewrap
def test_what_the_machine_causes_is_an_error_and_not_a_zero(monkeypatch, open_folder):
    judge = code(**bubblewrapped)
    fake_bwrap(monkeypatch, open_folder, "echo bwrap: no space >&2; exit 1")
    with pytest.raises(RuntimeError, match="did not start.*bwrap: no space"):
        judge("", DOUBLE, tests=ASSERTS)
    monkeypatch.setenv("PATH", "/no/folder")
    with pytest.raises(RuntimeError, match="bwrap is not on PATH"):
        judge("", DOUBLE, tests=ASSERTS)


@needs_bubblewrap
def test_a_sandbox_that_is_ended_from_outside_is_an_error_and_not_a_zero():
    judge = code(timeout_s=60.0)
    me = psutil.Process()

    def started():
        return [one for one in me.children(recursive=True) if one not in before]

    def kill():
        wait_for(lambda: len(started()) > 2, 60.0, "the program")
        started()[1].send_signal(signal.SIGKILL)

    judge("", DOUBLE, tests=PAIRS)  # which are tried
    before = me.children(recursive=True)  # of other tests
    killer = Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match="ended from outside"):
        judge("", "import time\ntime.sleep(60)", tests=PAIRS)
    killer.join()


def test_a_program_that_the_kernel_ends_for_lack_of_memory_is_an_error_and_not_a_zero(monkeypatch):
    dies = "import os\nos.kill(os.getpid(), 9)"
    judge = code()
    assert judge("", dies, tests=PAIRS) == 0.0  # it has done that itself
    numbers = itertools.count()
    monkeypatch.setattr(session, "_oom_kills", lambda: f"oom_kill {next(numbers)}")
    with pytest.raises(RuntimeError, match="out of memory"):
        judge("", dies, tests=PAIRS)


@needs_bubblewrap
@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_that_got_no_processor_is_an_error_unless_it_had_several_processes(
    processes, monkeypatch
):
    judge = code(**bubblewrapped, timeout_s=1.5)
    only_waits = session.RUNNER.replace("int(stat.read().split()[1]) * 1e-9", "1e9")
    assert only_waits != session.RUNNER
    monkeypatch.setattr(session, "RUNNER", only_waits)
    program = "import os, time\n" + "os.fork()\n" * (processes - 1) + "time.sleep(60)"
    if processes > 1:
        assert judge("", program, tests=PAIRS) == 0.0
        return
    with pytest.raises(TimeoutError, match="too busy"):
        judge("", program, tests=PAIRS)
