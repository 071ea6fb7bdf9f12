"""A target from outside: its settings, its start, its end, and what it leaves."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.chaos.journal import Line, Reader
from lrl.generators.supervisor import SHM
from tests.leftovers import MARK, left_in_shared_memory, living, words

ROOT = Path(__file__).resolve().parents[2]
JOIN_PORT = 7011
"""Where generators of the second node join."""
LOOK_S = 0.1
WAIT_S = 900.0
"""Deadline of everything that an experiment waits for."""
TORCHS_CACHE = "torchinductor_"
"""Torch keeps its compiled code in the temporary folder, for the next process; any run leaves
that."""
GONE_S = 20.0
"""Within so many seconds of a kill nothing of the target may be left."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The settings of a target, which gets them as JSON; the usual ones have their names in a
    run."""

    folder: str
    """Of its journal, checkpoint, log and responses."""
    groups: int
    responses: int
    capacity: int
    """Responses a generator writes at once; far below `groups * responses`, generators are never
    idle."""
    seed: int
    lr: float
    heartbeat_s: float
    sync_deadline_s: float
    steps_per_epoch: int = 0
    """The data set is cut to so many steps; 0 takes all training problems."""
    second_node: bool = False
    """Whether one of the generators is on another machine; somebody starts both."""
    host: str = ""
    """This machine's address there."""
    environment: str = ""
    """Class path of what plays the episodes; empty for responses of one turn."""


class Target:
    """One launch of a target; leaving its context kills it if it still runs."""

    def __init__(self, settings: TargetSettings) -> None:
        self.settings = settings
        self.folder = Path(settings.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Reader(self.folder / "journal.jsonl")
        self.number = sum(line["event"] == "launch" for line in self.journal.refresh())
        self.mark = uuid.uuid4().hex
        self.scratch = Path(tempfile.mkdtemp(prefix="lrl-chaos-"))
        self.output = self.folder / f"output-{self.number}.log"
        self._shared_before = set(os.listdir(SHM))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, MARK: self.mark, "TMPDIR": str(self.scratch)}
        self.environment = os.environ | own | {"LRL_TOKEN": secrets.token_hex(16)}
        words = [sys.executable, "-m", "benchmarks.chaos.target", json.dumps(asdict(settings))]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *error: object) -> None:
        # The trainer's process alone; the others notice by themselves.
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def lines(self, event: str) -> list[Line]:
        self.journal.refresh()
        return [line for line in self.journal.of(event) if line["launch"] == self.number]

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Waits until `condition` holds.

        Raises:
            RuntimeError: The process has ended; the message has the end of its output.
            TimeoutError: It does not hold within `WAIT_S` seconds.
        """
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if not self.runs:
                raise RuntimeError(self._error(f"ended ({self.process.returncode}) before {what}"))
            if time.monotonic() > deadline:
                raise TimeoutError(self._error(f"did not get to {what} within {WAIT_S:g} s"))
            time.sleep(LOOK_S)

    def wait_for_steps(self, count: int, what: str) -> None:
        """Waits until the launch has trained so many steps more."""
        last = len(self.lines("step")) + count
        self.wait_for(lambda: len(self.lines("step")) >= last, what)

    def stop(self) -> None:
        """Has the run end after its step.

        Raises:
            RuntimeError: It ended with an error.
        """
        (self.folder / "stop").touch()
        if status := self.process.wait(WAIT_S):
            raise RuntimeError(self._error(f"ended with exit status {status}"))

    def leftovers(self) -> dict[str, object]:
        """Returns what is left of an ended target, after `GONE_S` seconds or as soon as nothing is,
        and removes its temporary folder.

        Returns:
            `gone_s` until the last process and file in shared memory went, or None; `processes` and
            `shared` that stayed, by name; `temporary_files` in its temporary folder, except torch's
            cache.
        """
        ended, gone_s = time.monotonic(), None
        while any((left := self._left()).values()):
            if time.monotonic() > ended + GONE_S:
                break
            time.sleep(LOOK_S)
        else:
            gone_s = round(time.monotonic() - ended, 1)
        names = sorted(path.name for path in self.scratch.iterdir())
        temporary = [name for name in names if not name.startswith(TORCHS_CACHE)]
        return {"gone_s": gone_s, **left, "temporary_files": temporary}

    def _left(self) -> dict[str, list[str]]:
        return {
            "processes": [" ".join(words(process))[:100] for process in living(self.mark)],
            "shared": sorted(left_in_shared_memory(self._shared_before)),
        }

    def _error(self, what: str) -> str:
        tail = "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])
        return f"Launch {self.number} of the target {what}. The end of {self.output}:\n{tail}"
