"""CPU pinning of real processes with several threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from lrl.system.cpu_affinity import CpuPinning
from lrl.system.event_loop import LoopThread

EVERY = os.sched_getaffinity(0)
SOME = {max(EVERY)}
TWO_THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.skipif(len(EVERY) < 2, reason="there is nothing to share")


@pytest.fixture
def program() -> Iterator[psutil.Popen]:
    with psutil.Popen([sys.executable, "-c", TWO_THREADS], stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        yield started
        started.kill()


@pytest.fixture
def thread() -> Iterator[int]:
    """A thread of this process."""
    loop = LoopThread()
    yield loop.thread
    loop.close()


def cores(process: psutil.Process) -> list[set[int]]:
    return [os.sched_getaffinity(one.id) for one in process.threads()]


def test_every_thread_is_pinned_except_in_an_unpinned_block(
    program: psutil.Popen, thread: int
) -> None:
    pinning = CpuPinning(SOME, thread)
    pinning.set_processes(0, [program])
    pinning.pin()
    assert cores(program) == [SOME, SOME] and os.sched_getaffinity(thread) == SOME
    with pytest.raises(KeyboardInterrupt), pinning.unpinned():
        assert cores(program) == [EVERY, EVERY] and os.sched_getaffinity(thread) == EVERY
        raise KeyboardInterrupt
    assert cores(program) == [SOME, SOME] and os.sched_getaffinity(thread) == SOME
    assert os.sched_getaffinity(threading.main_thread().native_id or 0) == EVERY


def test_without_cores_nothing_is_moved(program: psutil.Popen, thread: int) -> None:
    program.cpu_affinity(list(SOME))
    pinning = CpuPinning((), thread)
    pinning.set_processes(0, [program])
    with pinning.unpinned():
        assert SOME in cores(program) and os.sched_getaffinity(thread) == EVERY


def test_a_process_that_has_ended_or_was_replaced_is_passed_over(
    program: psutil.Popen, thread: int
) -> None:
    ended = psutil.Popen([sys.executable, "-c", ""])
    ended.wait()
    pinning = CpuPinning(SOME, thread)
    pinning.set_processes(0, [program])
    pinning.set_processes(0, [ended])
    pinning.pin()
    assert cores(program) == [EVERY, EVERY] and os.sched_getaffinity(thread) == SOME


def test_a_machine_without_pinning_is_logged_once_and_the_run_continues(
    thread: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*words: object) -> None:
        raise PermissionError("not allowed")

    pinning = CpuPinning(SOME, thread)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    for _ in range(2):
        pinning.pin()
    assert caplog.text.count("not allowed") == 1
