"""A victim seen from outside: started, waited for, killed, and looked for afterwards.

A mark in the environment finds every process that a victim has started, by whatever way. What stays in /dev/shm is
what came after the start, and is mapped by no process any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.chaos.journal import Line, Reader
from benchmarks.chaos.settings import VictimSettings
from lrl.generators.supervisor import mapped

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
MARK = "LRL_CHAOS_MARK"
LOOK_S = 0.1
TORCHS_CACHE = "torchinductor_"
"""Torch keeps what it compiled in the temporary folder, for the next process; any run leaves that."""
GONE_S = 20.0
"""Within so many seconds of a kill nothing of the victim may be left."""


class Ended(RuntimeError):
    """A victim ended while it was not to; the message has the end of its output."""


class Victim:
    """One launch of a victim; leaving its context kills it, should it still run.

    Args:
        settings: What it is made of.
    """

    def __init__(self, settings: VictimSettings) -> None:
        self.folder = Path(settings.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Reader(self.folder / "journal.jsonl")
        self.number = len([line for line in self.journal.refresh() if line["event"] == "launch"])
        self.mark, self.scratch = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="lrl-chaos-"))
        self.output = self.folder / f"output-{self.number}.log"
        self.started = time.time()
        self._shared_before = set(os.listdir(SHM))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, MARK: self.mark, "TMPDIR": str(self.scratch)}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.chaos.victim", *settings.words],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def lines(self, event: str) -> list[Line]:
        """What this launch has written of one kind so far."""
        self.journal.refresh()
        return [line for line in self.journal.of(event) if line["launch"] == self.number]

    def wait_for(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Look until `condition` holds.

        Raises:
            Ended: The process has ended.
            TimeoutError: It does not hold within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise Ended(self._told(f"ended with exit status {self.process.returncode} before {what}"))
            if time.monotonic() > deadline:
                raise TimeoutError(self._told(f"did not get to {what} within {timeout_s:g} s"))
            time.sleep(LOOK_S)

    def wait(self, timeout_s: float) -> None:
        """Wait for its good end.

        Raises:
            Ended: It ended with an error.
            TimeoutError: It runs after `timeout_s` seconds.
        """
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(self._told(f"did not end within {timeout_s:g} s")) from error
        if status:
            raise Ended(self._told(f"ended with exit status {status}"))

    def kill(self) -> None:
        """SIGKILL to the trainer's process; the others learn of it by themselves."""
        self.process.kill()
        self.process.wait()

    def leftovers(self) -> dict[str, object]:
        """What is left of an ended victim, after `GONE_S` seconds or as soon as nothing is.

        Returns:
            `gone_s` until the last process and file in shared memory went, or None; `processes` and `shared` that
            stayed, by name; `temporary_files` in its temporary folder, torch's cache left out; the folder is removed.
        """
        ended = time.monotonic()
        while (processes := self._living()) or (shared := self._shared()):
            if time.monotonic() > ended + GONE_S:
                return {"gone_s": None, "processes": processes, "shared": self._shared()} | self._clean()
            time.sleep(LOOK_S)
        return {"gone_s": round(time.monotonic() - ended, 1), "processes": processes, "shared": shared} | self._clean()

    def _living(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                marked = process.environ().get(MARK) == self.mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.name())
            except (psutil.Error, OSError):
                continue  # it ended meanwhile, or is another user's
        return found

    def _shared(self) -> list[str]:
        new = set(os.listdir(SHM)) - self._shared_before
        used = mapped(psutil.pids()) if new else set()
        return sorted(name for name in new if _inode(SHM / name) not in used | {None})

    def _clean(self) -> dict[str, object]:
        left = sorted(path.name for path in self.scratch.iterdir() if not path.name.startswith(TORCHS_CACHE))
        shutil.rmtree(self.scratch)
        return {"temporary_files": left}

    def _told(self, what: str) -> str:
        tail = "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])
        return f"Launch {self.number} of the victim {what}. The end of {self.output}:\n{tail}"


def _inode(path: Path) -> int | None:
    """None if the file has gone meanwhile."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
