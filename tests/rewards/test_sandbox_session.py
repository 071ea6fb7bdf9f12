"""What ends a program from outside is an error and not a 0."""

import itertools
import signal

import psutil
import pytest

from lrl.rewards import sandbox_session
from tests.rewards.bubblewrap_here import needs_bubblewrap
from tests.rewards.test_code import PAIRS, code, isolations


@isolations
def test_a_sandbox_that_is_ended_from_outside_is_an_error_and_not_a_zero(isolation, monkeypatch):
    waits = sandbox_session.SandboxSession._broken_limit

    def kill(session):
        first = psutil.Process(session._process.pid)
        if session._began and first.status() != psutil.STATUS_ZOMBIE:
            for victim in first.children() if isolation == "bubblewrap" else [first]:
                victim.send_signal(signal.SIGKILL)
        return waits(session)

    judge = code(isolation)
    monkeypatch.setattr(sandbox_session.SandboxSession, "_broken_limit", kill)
    with pytest.raises(RuntimeError, match="ended from outside"):
        judge("", "import time\ntime.sleep(60)", tests=PAIRS)


@isolations
def test_a_program_that_the_kernel_ends_for_lack_of_memory_is_an_error_and_not_a_zero(
    isolation, monkeypatch
):
    dies = "import os\nos.kill(os.getpid(), 9)"
    judge = code(isolation)
    assert judge("", dies, tests=PAIRS) == 0.0  # it has done that itself
    numbers = itertools.count()
    monkeypatch.setattr(sandbox_session, "_oom_kills", lambda: f"oom_kill {next(numbers)}")
    with pytest.raises(RuntimeError, match="out of memory"):
        judge("", dies, tests=PAIRS)


@needs_bubblewrap
@pytest.mark.parametrize("processes", [1, 2])
def test_a_program_that_got_no_processor_is_an_error_unless_it_had_several_processes(
    processes, monkeypatch
):
    class Stopped:
        """The clock of a process that only waits for a processor."""

        seconds = 0.0

        def __init__(self, *pids, born):
            assert all(map(psutil.pid_exists, pids))

    judge = code("bubblewrap", timeout_s=1.5)
    monkeypatch.setattr(sandbox_session, "ProcessClock", Stopped)
    program = "import os, time\n" + "os.fork()\n" * (processes - 1) + "time.sleep(60)"
    if processes > 1:
        assert judge("", program, tests=PAIRS) == 0.0
        return
    with pytest.raises(TimeoutError, match="too busy"):
        judge("", program, tests=PAIRS)
