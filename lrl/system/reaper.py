"""A program that runs another one, and ends with it all that it has started.

    python -I -S reaper.py COMMAND ...

A process that leaves its session and its parent becomes a child of this one, which is a subreaper.
SIGTERM ends all of it before. Standard library only: there is one for each episode.
"""

import ctypes
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
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
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


def _end(number: int, _frame: object) -> None:
    end_children()
    os._exit(128 + number)


def end_children() -> None:
    """Kills the children of this process, and those that they leave to it, until it has none."""
    until = time.monotonic() + _END_S
    with suppress(ChildProcessError):  # there is none
        while time.monotonic() < until:
            for pid in _children():
                with suppress(PermissionError):  # it is another user's, by sudo
                    os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.002)


def _children() -> list[int]:
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            name_and_more = Path("/proc", pid, "stat").read_text(errors="replace")
            if int(name_and_more.rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(pid))
    return found


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
