"""Runs a command for an actor of Ray, and ends it gracefully when the actor ends, however that
does.

A small program: `python ray_guard.py GRACE_S COMMAND ...`. Ray kills the children of its actors,
and nothing below them, so this process only passes on signals and the exit status; its child is
the guard. SIGTERM, and the end of this process, ask the command to end: it has GRACE_S seconds to
save, then it is killed. SIGQUIT kills it at once. What it has started is killed behind it.

Linux only. Standard library and psutil only, as the supervisor's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from lrl.generators.supervisor import TICK_S, Tree
from lrl.system.processes import adopt_orphans, die_with, shell_status, start_bound

BEHIND_S = 40.0
"""Seconds that what the command has started may outlast it: supervisors end vLLM and remove its
files."""
PASSED_ON = (signal.SIGTERM, signal.SIGQUIT)


def guard(command: list[str], grace_s: float) -> int:
    """Runs `command`; returns its exit status as a shell gives it (128 + signal)."""
    adopt_orphans()
    child = start_bound(command, by=signal.SIGKILL, stdin=subprocess.DEVNULL)
    asked: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, lambda number, _: asked.append(number))
    while child.poll() is None and not asked:
        time.sleep(TICK_S)
    child.terminate()  # once: a second SIGTERM would end the command at once
    end = time.monotonic() + grace_s
    while child.poll() is None and signal.SIGQUIT not in asked and time.monotonic() < end:
        time.sleep(TICK_S)
    child.kill()
    Tree(child).end(BEHIND_S)
    return shell_status(child.poll())


def main() -> int:
    """Runs the program; returns the command's exit status."""
    # Ray blocks SIGINT in its processes, and children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, PASSED_ON)
    owner = os.getpid()
    if (child := os.fork()) == 0:
        die_with(owner, by=signal.SIGHUP)
        for ignored in (signal.SIGINT, signal.SIGHUP, *PASSED_ON):
            signal.signal(ignored, lambda *_: None)  # not SIG_IGN, which the command would inherit
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return guard(sys.argv[2:], float(sys.argv[1]))
    for signum in PASSED_ON:
        signal.signal(signum, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256


if __name__ == "__main__":
    sys.exit(main())
