"""The supervisor of one generator: it starts vLLM and ends all of it when the trainer asks, or when the trainer is
gone.

A small program of its own (`python supervisor.py --owner PID --prefix NAME -- COMMAND ...`), one per generator, in its
own session, so that neither Ctrl-C nor a SIGKILL of the trainer reaches it. Its stdin is a pipe whose other end the
trainer holds from the first moment. A byte means "stop, the run goes on"; the end of the pipe without one means that
the trainer ended, by whatever signal. vLLM is a tree of processes (API server, EngineCore, workers, resource tracker)
whose lower parts survive a SIGKILL of the upper ones; the supervisor is their subreaper: every orphan becomes its
child, and none is missed.

Not used: PR_SET_PDEATHSIG from the trainer, because it fires when the *thread* that spawned ends. The supervisor has
one thread only, so for its own child it is a safe second line, should the supervisor itself be killed.

Linux only, as vLLM's wheels are. Standard library and psutil only: it must start at once and hold no memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import psutil

log = logging.getLogger("supervisor")

SHM = Path("/dev/shm")
TICK_S = 0.2
"""How late an end is noticed at most when the pipe does not tell it."""
LOOK_S = 2.0
"""How often the shared memory in use is written down; a process that crashes can no longer be asked."""
KILL_S = 8.0
"""How long killed processes may take to go; one that waits for a driver can outlast SIGKILL."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LONGEST_TEMPORARY = 107 - len("/lrl-xxxxxxxx/") - 36
"""A Unix socket's path has at most 107 characters, and vLLM names its sockets by a UUID of 36."""


class End(Enum):
    """Why the generator ends; the value is the seconds vLLM gets to end tidily after SIGTERM (it needs about 2)."""

    EXITED = 2.0
    STOPPED = 4.0
    OWNER_GONE = 1.0


class Tree:
    """Every process that descends from this one, and the shared memory they have mapped so far.

    Args:
        child: The root, whose exit status is left for its Popen to collect.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        self.shared: set[int] = set()

    def look(self) -> list[psutil.Process]:
        """Write down the shared memory in use and return the processes alive."""
        self.child.poll()
        living = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    self._reap(process)
                else:
                    living.append(process)
        self.shared |= mapped(process.pid for process in living)
        return living

    def end(self, grace_s: float) -> None:
        """SIGTERM to the root, `grace_s` seconds, then SIGKILL to all that is left, until nothing is."""
        if self.child.poll() is None:
            self.child.terminate()
        start = time.monotonic()
        while living := self.look():
            passed = time.monotonic() - start
            if passed > grace_s + KILL_S:
                log.error("processes %s outlast SIGKILL; giving up on them", [process.pid for process in living])
                return
            if passed > grace_s:
                kill(living)
            time.sleep(0.05)

    def _reap(self, zombie: psutil.Process) -> None:
        """Collect an orphan that became our child. Its own parent collects any other."""
        if zombie.pid != self.child.pid and zombie.ppid() == os.getpid():
            os.waitpid(zombie.pid, os.WNOHANG)


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each of `processes` that still lives."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def mapped(pids: Iterable[int]) -> set[int]:
    """The inodes in /dev/shm that the processes `pids` have mapped; those gone or not ours are passed over.

    Not the names: glibc makes a semaphore under a passing name, which is what its maker's map shows for ever.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            inodes |= {int(line.split()[4]) for line in lines if f" {SHM}/" in line}
    return inodes


def remove(prefix: str | None, inodes: set[int]) -> None:
    """Remove the files in /dev/shm that have one of `inodes` or whose name begins with `prefix`."""
    for path in SHM.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another supervisor of the run was quicker
            if path.stat().st_ino in inodes or (prefix is not None and path.name.startswith(prefix)):
                path.unlink()


def wait(tree: Tree, owner: int, asked: list[int]) -> End:
    """Wait for the first of: vLLM's exit, a byte or signal that asks to stop, the end of the trainer.

    The owner's pid is compared too: a process forked off the trainer holds a copy of the pipe and would keep it open.
    """
    looked = time.monotonic()
    while True:
        if tree.child.poll() is not None:
            return End.EXITED
        if asked:
            return End.STOPPED
        if os.getppid() != owner:
            return End.OWNER_GONE
        if select.select([sys.stdin], [], [], TICK_S)[0]:
            return End.STOPPED if os.read(sys.stdin.fileno(), 1) else End.OWNER_GONE
        if time.monotonic() - looked > LOOK_S:
            tree.look()
            looked = time.monotonic()


def die_with_supervisor() -> None:
    """In the child before exec: ask the kernel for a SIGTERM when the supervisor ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder of the generator's own: vLLM leaves its sockets, rendezvous and compiler files behind."""
    usual = tempfile.gettempdir()
    where = usual if len(usual) <= LONGEST_TEMPORARY else "/tmp"  # a cluster's can be long
    return tempfile.TemporaryDirectory(prefix="lrl-", dir=where, ignore_cleanup_errors=True)


def keep(command: list[str], owner: int, prefix: str) -> int:
    """Run `command` until the first reason to end it, end all of it, and remove what it left.

    Args:
        command: Program and arguments.
        owner: Process id of the trainer.
        prefix: How the run's own files in /dev/shm begin. They go with the trainer; while it lives they are its own.

    Returns:
        The exit status of `command`, as a shell gives it (128 + signal).
    """
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, lambda *_: None)  # not SIG_IGN, which vLLM would inherit
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    with scratch_folder() as scratch:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,
            preexec_fn=die_with_supervisor,
        )
        tree = Tree(child)
        why = wait(tree, owner, asked)
        log.info("%s after exit status %s; ending %s", why.name, child.returncode, [p.pid for p in tree.look()])
        tree.end(why.value)
        run_is_over = why is End.OWNER_GONE or os.getppid() != owner
        remove(prefix if run_is_over else None, tree.shared - mapped(psutil.pids()))
    status = child.returncode if child.returncode is not None else -signal.SIGKILL
    return status if status >= 0 else 128 - status


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--owner", type=int, required=True, help="process id of the trainer")
    parser.add_argument("--prefix", required=True, help="how the run's own files in /dev/shm begin")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    return keep(arguments.command, arguments.owner, arguments.prefix)


if __name__ == "__main__":
    sys.exit(main())
