"""Runs a command for a process that may end at any moment, and then ends the command gracefully.

A small program (`python ray_guard.py --grace_s 600 -- COMMAND ...`) whose standard input is a
socket. A line with a number is a signal for the command; SIGKILL is for all that the command has
started, too. The end of the socket means that the owner is gone, by whatever signal: then the
command gets SIGTERM, and `grace_s` later SIGKILL. Its exit status is written to the socket. What it
leaves behind is killed.

The program is no child of its owner: Ray kills the children of its tasks, and they would have no
time to save.

Linux only. Standard library and psutil only, as the supervisor's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time

from lrl.generators.supervisor import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, TICK_S, Tree

BEHIND_S = 40.0
"""Seconds that what the command has started may outlast it: supervisors end vLLM and remove its
files."""


def obey(child: subprocess.Popen[bytes], owner: socket.socket, grace_s: float) -> float:
    """Passes signals on until the child ends or must be killed; returns the seconds that the rest
    of it has."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)  # not SIG_IGN, which the command would inherit
    asked, end = False, float("inf")
    while child.poll() is None:
        if time.monotonic() > end:
            return 0.0
        if end < float("inf"):
            time.sleep(TICK_S)
        elif told or select.select([owner], [], [], TICK_S)[0]:
            signals = list(map(int, owner.recv(4096).split())) if not told else []
            if signal.SIGKILL in signals:
                return 0.0
            for signum in signals:
                child.send_signal(signum)
            if not signals:
                end = time.monotonic() + grace_s
                if not asked:  # a second signal would end it at once
                    child.terminate()
            asked = True
    return BEHIND_S


def guard(command: list[str], grace_s: float, owner: socket.socket) -> int:
    """Runs `command`; returns its exit status as a shell gives it (128 + signal)."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Ray blocks SIGINT in its processes, and children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    tree = Tree(child)
    tree.end(obey(child, owner, grace_s))
    status = child.returncode if child.returncode is not None else -signal.SIGKILL
    return status if status >= 0 else 128 - status


def main() -> int:
    """Runs the program; returns the command's exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--grace_s", type=float, required=True, help="seconds between SIGTERM and SIGKILL"
    )
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    arguments = parser.parse_args()
    if os.fork():
        os._exit(0)  # the owner waits for this process
    owner = socket.socket(fileno=sys.stdin.fileno())
    status = guard(arguments.command, arguments.grace_s, owner)
    with contextlib.suppress(OSError):  # the owner is gone
        owner.sendall(f"{status}\n".encode())
    return status


if __name__ == "__main__":
    sys.exit(main())
