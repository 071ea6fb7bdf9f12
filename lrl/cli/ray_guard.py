"""Runs a command for a process that may end at any moment, and then ends the command gracefully.

A small program (`python ray_guard.py GRACE_S COMMAND ...`) whose standard input is a socket. A line
with a number is a signal for the command; SIGKILL is for all that the command has started, too. The
end of the socket means that the owner is gone, by whatever signal: then the command gets SIGTERM,
and GRACE_S seconds later SIGKILL. Its exit status is written to the socket. What it leaves behind
is killed.

The program is no child of its owner: Ray kills the children of its tasks, and they would have no
time to save.

Linux only. Standard library and psutil only, as the supervisor's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time

from lrl.generators.supervisor import TICK_S, Tree
from lrl.system.processes import adopt_orphans, shell_status, start_bound

BEHIND_S = 40.0
"""Seconds that what the command has started may outlast it: supervisors end vLLM and remove its
files."""


def obey(child: subprocess.Popen[bytes], owner: socket.socket, grace_s: float) -> float:
    """Passes signals on until the child ends or must be killed; returns the seconds that the rest
    of it has."""
    asked, end = False, float("inf")
    while child.poll() is None:
        if time.monotonic() > end:
            return 0.0
        if end < float("inf"):
            time.sleep(TICK_S)
        elif select.select([owner], [], [], TICK_S)[0]:
            signals = [int(line) for line in owner.recv(4096).split()]
            if signal.SIGKILL in signals:
                return 0.0
            if not signals:
                end = time.monotonic() + grace_s
            # When the owner is gone, too; but a second signal would end the command at once.
            for signum in signals or [signal.SIGTERM] * (not asked):
                child.send_signal(signum)
            asked = True
    return BEHIND_S


def guard(command: list[str], grace_s: float, owner: socket.socket) -> int:
    """Runs `command`; returns its exit status as a shell gives it (128 + signal)."""
    signal.signal(signal.SIGTERM, lambda *_: owner.shutdown(socket.SHUT_RD))  # as if it were gone
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)  # not SIG_IGN, which the command would inherit
    adopt_orphans()
    # Ray blocks SIGINT in its processes, and children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    child = start_bound(command, by=signal.SIGKILL, stdin=subprocess.DEVNULL)
    Tree(child).end(obey(child, owner, grace_s))
    return shell_status(child.returncode)


def main() -> None:
    """Runs the program."""
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    if os.fork():
        os._exit(0)  # the owner waits for this process
    owner = socket.socket(fileno=sys.stdin.fileno())
    status = guard(command, grace_s, owner)
    with contextlib.suppress(OSError):  # the owner is gone
        owner.sendall(f"{status}\n".encode())


if __name__ == "__main__":
    main()
