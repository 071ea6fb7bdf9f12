"""A process that waits for another one, and ends with it all that it has started.

    python -I -S reaper.py COMMAND ...

A process that leaves its session and its parent becomes a child of this one, which is a subreaper.
SIGTERM ends all of it before. Standard library only: there is one for each episode of a command.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_S = 8.0
"""Seconds that killed processes may take to end; one that waits for a driver can outlast
SIGKILL."""


def run(command: list[str]) -> int:
    """Runs a command; returns its exit status as a shell gives it (128 + signal)."""
    libc = ctypes.CDLL(None)
    adopt_orphans()
    signal.signal(signal.SIGTERM, _end)
    try:
        child = subprocess.Popen(
            command,
            start_new_session=True,  # `kill 0` of a script must not reach this process
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        os.close(0)  # whoever writes to its input notices that it reads no more
        status = child.wait()
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")
    finally:
        end_children()
    return status if status >= 0 else 128 - status


def fork() -> None:
    """Continues in a child of this process, which waits for it and ends as it does."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, _end)
    if child := os.fork():
        ended = 0
        while ended != child:  # others are orphans
            ended, status = os.wait()
        end_children()
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code & 255)


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end(number: int, _frame: object) -> None:
    end_children()
    os._exit(128 + number)


def end_children(since: float = 0.0, before: float = math.inf) -> None:
    """Kills the children of this process that have begun in this time (of CLOCK_BOOTTIME), and
    those that they leave to it, until it has none."""
    until = time.monotonic() + _END_S
    while (found := _children(since, before)) and time.monotonic() < until:
        for pid in found:
            with suppress(PermissionError):  # it is another user's, by sudo
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def _children(since: float, before: float) -> list[int]:
    found: list[int] = []
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has none, and /proc need not be read
        return found
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            name_and_more = Path("/proc", pid, "stat").read_text(errors="replace")
            fields = name_and_more.rpartition(")")[2].split()
            began = (int(fields[19]) + 1) / os.sysconf("SC_CLK_TCK")  # the kernel rounds it down
            if int(fields[1]) == os.getpid() and since <= began < before:
                found.append(int(pid))
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
