"""The supervisor process of one generator: starts vLLM, and ends all of it on request or when the
trainer is gone.

    python -P supervisor.py OWNER SCRATCH COMMAND ...

OWNER is the trainer's process id. At every end vLLM's temporary folder SCRATCH is removed, and what
it had in /dev/shm.

It runs in its own session, which no Ctrl-C reaches. Its stdin is a pipe from the trainer: a byte
means "stop, the run continues", and its end without one that the trainer has ended, by whatever
signal. vLLM is a tree of processes, whose lower parts survive a SIGKILL of the upper ones; the
supervisor is their subreaper: every orphan becomes its child.

Not used: PR_SET_PDEATHSIG from the trainer, because it fires when the *thread* that spawned ends.
The supervisor has one thread only, so for its own child it is a safe second line, should the
supervisor itself be killed. What is left then is for whoever started it to end and to remove
(`clear`).

Linux only, as vLLM's wheels are. Standard library and psutil only: it must start at once and hold
no memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import psutil

from lrl.system.processes import KILL_S, adopt_orphans, shell_status, start_bound

log = logging.getLogger("supervisor")

SHM = Path("/dev/shm")
TICK_S = 0.2
"""The longest delay in noticing an end that the pipe does not show."""
SCAN_S = 2.0
"""Seconds between two scans of the shared memory in use; after a crash it is too late for one."""


class End(Enum):
    """Reason of a generator's end; the value is vLLM's grace time in seconds after SIGTERM (it
    needs about 2)."""

    EXITED = 2.0
    STOPPED = 4.0
    OWNER_GONE = 1.0


@dataclass
class Tree:
    """All descendants of this process, with `child` as their root, and the inodes of the shared
    memory they have mapped so far."""

    child: subprocess.Popen[bytes]
    shared: set[int] = field(default_factory=set)

    def scan(self) -> list[psutil.Process]:
        """Records the shared memory in use, reaps orphans and returns the living processes."""
        self.child.poll()
        living = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
                # Reaps orphans only: a Popen collects the child's exit status, and other zombies
                # have a parent.
                elif process.pid != self.child.pid and process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
        self.shared |= mapped(process.pid for process in living)
        return living

    def end(self, grace_s: float) -> None:
        """Sends SIGTERM to the root and, after `grace_s` seconds, SIGKILL to the rest; waits until
        all have ended."""
        if self.child.poll() is None:
            self.child.terminate()
        wait_or_kill(self.scan, grace_s)


def wait_or_kill(scan: Callable[[], list[psutil.Process]], grace_s: float) -> None:
    """Waits until `scan` returns no process; after `grace_s` seconds kills those that it
    returns."""
    start = time.monotonic()
    while living := scan():
        passed = time.monotonic() - start
        if passed > grace_s + KILL_S:
            log.error("these processes outlast SIGKILL: %s", living)
            return
        for process in living if passed > grace_s else ():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.05)


def mapped(pids: Iterable[int]) -> set[int]:
    """Returns the inodes in /dev/shm mapped by `pids`; skips ended and foreign processes."""
    # Not the names: glibc makes a semaphore under a temporary name, which its maker's map shows for
    # ever.
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            inodes |= {int(line.split()[4]) for line in lines if f" {SHM}/" in line}
    return inodes


def remove_shared(inodes: set[int]) -> None:
    """Removes what this user has in /dev/shm with one of `inodes`, unless a process has mapped
    it."""
    unused = inodes - mapped(psutil.pids())
    for path in SHM.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another supervisor of the run was quicker
            found = path.lstat()
            if found.st_uid == os.geteuid() and found.st_ino in unused:
                path.unlink()


def clear(scratch: str) -> None:
    """Cleans up after a killed supervisor: ends vLLM, and removes its files."""
    shared: set[int] = set()

    def scan() -> list[psutil.Process]:
        # psutil has None for the environment of an ended or foreign process.
        living = [
            process
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get("TMPDIR") == scratch
        ]
        shared.update(mapped(process.pid for process in living))
        return living

    wait_or_kill(scan, End.STOPPED.value)  # vLLM has got its SIGTERM with the supervisor's end
    remove_shared(shared)
    shutil.rmtree(scratch, ignore_errors=True)


def wait_for_end(tree: Tree, owner: int, stop_signals: list[int]) -> End:
    scanned_at = time.monotonic()
    while True:
        if tree.child.poll() is not None:
            return End.EXITED
        if stop_signals:
            return End.STOPPED
        # A fork of the trainer holds a copy of the pipe and would keep it open.
        if os.getppid() != owner:
            return End.OWNER_GONE
        if select.select([sys.stdin], [], [], TICK_S)[0]:
            return End.STOPPED if os.read(sys.stdin.fileno(), 1) else End.OWNER_GONE
        if time.monotonic() - scanned_at > SCAN_S:
            tree.scan()
            scanned_at = time.monotonic()


def supervise(owner: int, scratch: str, command: list[str]) -> int:
    """Runs `command` until the first reason to end it, ends all of it, and removes its files;
    returns its exit status as a shell gives it."""
    stop_signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)  # not SIG_IGN, which vLLM would inherit
    adopt_orphans()
    try:
        environment = {**os.environ, "TMPDIR": scratch}
        child = start_bound(command, by=signal.SIGTERM, stdin=subprocess.DEVNULL, env=environment)
        tree = Tree(child)
        why = wait_for_end(tree, owner, stop_signals)
        living = [process.pid for process in tree.scan()]
        log.info("%s after exit status %s; ending %s", why.name, child.returncode, living)
        tree.end(why.value)
        remove_shared(tree.shared)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return shell_status(child.returncode)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    owner, scratch, *command = sys.argv[1:]
    sys.exit(supervise(int(owner), scratch, command))
