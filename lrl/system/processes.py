"""How a helper process ends: with its owner, and with all that it has started itself.

    python -I -S processes.py COMMAND ...

runs a command and ends with it all that it has started, also what leaves its session and its
parent: orphans become children of this process, which is a subreaper. SIGTERM ends all of it
before. Standard library only: there is one for each episode of a command.
"""

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL_S = 8.0
"""Seconds that killed processes may take to end; one that waits for a driver can outlast
SIGKILL."""
_bound = threading.Event()
"""Set after `die_with`."""


def die_with(owner: int, by: int = signal.SIGKILL) -> None:
    """Ends this process with the *thread* of its parent `owner` that started it, by that signal.

    Only the kernel can do that for a helper that runs foreign code: a watching thread cannot run
    while, say, a regular expression holds Python's lock.
    """
    _bound.set()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, by) != 0:
        text = "prctl(PR_SET_PDEATHSIG) failed; a helper process could outlive its run"
        raise OSError(ctypes.get_errno(), text)
    if os.getppid() != owner:  # it died before the line above
        os._exit(1)


def unbind_from_parent() -> None:
    """Undoes `die_with`, for a process with other ways to notice the end of its owner."""
    if not _bound.is_set():  # then whoever started this process has bound it, for good
        return
    _bound.clear()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


def bound_to_this_process(words: Sequence[str], by: int = signal.SIGKILL) -> list[str]:
    """Returns a command whose process ends with this one; see `die_with`."""
    begin = (
        "import os, sys; from lrl.system.processes import die_with; "
        "die_with(int(sys.argv[1]), int(sys.argv[2])); os.execv(sys.argv[3], sys.argv[3:])"
    )
    return [sys.executable, "-P", "-c", begin, str(os.getpid()), str(int(by)), *words]


def machine() -> str:
    """Returns the same string in processes that share pids, ports and users."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join(
        [boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net", "user"))]
    )


def started(pid: int) -> int | None:
    """Returns when a process started, in the kernel's ticks since boot; None if it has ended."""
    fields = _stat(pid)
    return None if not fields or fields[0] == "Z" else int(fields[19])


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, by default this one, as others recognise it and see that it has ended. The start
    time makes it unique: the kernel uses a pid again."""

    machine: str = field(default_factory=machine)
    pid: int = field(default_factory=os.getpid)
    started: int | None = field(default_factory=lambda: started(os.getpid()))

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        return self.machine == machine()

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended; always False for a process of another machine."""
        return self.here and started(self.pid) != self.started


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants whose parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_children(since: float = 0.0, before: float = math.inf) -> None:
    """Kills the children of this process begun in this time (of CLOCK_BOOTTIME), and those that
    they leave to it, until it has none."""
    until = time.monotonic() + KILL_S
    while (found := _children(since, before)) and time.monotonic() < until:
        for pid in found:
            with suppress(PermissionError):  # it is another user's, by sudo
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)


def start_bound(command: Sequence[str], by: int, **settings: Any) -> subprocess.Popen[bytes]:
    """Starts the command that this single-threaded process serves, in a session of its own; it ends
    with this process, by that signal."""
    libc = ctypes.CDLL(None)
    return subprocess.Popen(
        command,
        start_new_session=True,  # `kill 0` of a script must not reach this process
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, by),
        **settings,
    )


def shell_status(returncode: int | None) -> int:
    """Returns the exit status of a shell for a Popen's returncode: 128 + signal for a signal, which
    a process that outlasts SIGKILL is still to get."""
    code = -signal.SIGKILL if returncode is None else returncode
    return code if code >= 0 else 128 - code


def run(command: list[str]) -> int:
    """Runs a command; returns its exit status as a shell gives it."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, _end)
    try:
        child = start_bound(command, by=signal.SIGKILL)
        os.close(0)  # whoever writes to its input notices that it reads no more
        return shell_status(child.wait())
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error}")
    finally:
        end_children()


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


def _end(number: int, _frame: object) -> None:
    end_children()
    os._exit(128 + number)


def _children(since: float, before: float) -> list[int]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has none, and /proc need not be read
        return []
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if fields := _stat(pid):
            began = (int(fields[19]) + 1) / os.sysconf("SC_CLK_TCK")  # the kernel rounds it down
            if int(fields[1]) == os.getpid() and since <= began < before:
                found.append(pid)
    return found


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat from the state on; empty if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return text.rpartition(")")[2].split()
    return []


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
