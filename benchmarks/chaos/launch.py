"""A target from outside: its settings, its start, its end, and what it leaves.

A mark in the environment finds every process that a target has started. Its leftovers in /dev/shm
are the files that came after its start and that no process maps any more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.journal import Line, Reader
from lrl.generators.supervisor import mapped

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
MARK = "LRL_CHAOS_MARK"
JOIN_PORT = 7011
"""Where generators of the second node join."""
LOOK_S = 0.1
NOTHING: dict[str, object] = {"processes": [], "shared": []}
WAIT_S = 900.0
"""Deadline of everything that an experiment waits for."""
TORCHS_CACHE = "torchinductor_"
"""Torch keeps its compiled code in the temporary folder, for the next process; any run leaves
that."""
GONE_S = 20.0
"""Within so many seconds of a kill nothing of the target may be left."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The settings of a target, and its command line.

    Args:
        folder: Of its journal, checkpoint, log and responses.
        steps: Optimizer steps; -1 is until the file `stop` is in the folder.
        steps_per_epoch: The data set is cut to so many steps; 0 takes all training problems.
        groups: Problems a step.
        responses: Responses to each.
        max_lag: See `lrl.RolloutDataModule`.
        capacity: Responses a generator writes at once; far below `groups * responses`, generators
            are never idle.
        seed: Of warm-up, order of the problems, and torch.
        lr: Peak learning rate.
        schedule: `linear` falls to 0 at the last step; without a last step it has to be `constant`.
        checkpoint_every: Steps between checkpoints.
        evaluate: Whether held-out problems are answered at the end.
        heartbeat_s: See `lrl.AsyncSingleDevice`.
        sync_deadline_s: See `WeightSync.deadline_s`.
        second_node: What runs on another machine: `given` or `ray` generators that this launcher
            starts, `trainer` a second rank with generators of its own. Empty if nothing does.
        host: This machine's address there.
        launcher: The launcher's settings in JSON.
        environment: Class path of what plays the episodes; empty for responses of one turn.
    """

    folder: str
    steps: int = 60
    steps_per_epoch: int = 30
    groups: int = 8
    responses: int = 16
    max_lag: int = 2
    capacity: int = 32
    seed: int = 0
    lr: float = 1e-4
    schedule: str = "linear"
    checkpoint_every: int = 1
    evaluate: bool = True
    heartbeat_s: float = 5.0
    sync_deadline_s: float = 10.0
    second_node: str = ""
    host: str = ""
    launcher: str = "{}"
    environment: str = ""

    @property
    def words(self) -> list[str]:
        return [f"--{name}={value}" for name, value in asdict(self).items()]

    @property
    def described(self) -> dict[str, object]:
        left_out = {"folder", "host", "launcher"}
        for name in ("second_node", "environment"):
            if not getattr(self, name):
                left_out.add(name)
        return {name: value for name, value in asdict(self).items() if name not in left_out}


def add_settings(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds the settings of a target that an experiment leaves open, with its defaults, and its two
    deadlines: a machine with other work to do needs longer ones."""
    for name, default in {
        **defaults,
        "seed": 0,
        "heartbeat_s": 5.0,
        "sync_deadline_s": 10.0,
    }.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(
            flag, type=type(default), default=default, help="see TargetSettings (%(default)s)"
        )


def settings_of(args: argparse.Namespace, **fixed: Any) -> TargetSettings:
    fixed.setdefault("folder", str(args.folder.resolve()))
    names = {field.name for field in fields(TargetSettings)} - set(fixed)
    return TargetSettings(
        **fixed, **{name: value for name, value in vars(args).items() if name in names}
    )


class Ended(RuntimeError):
    """A target ended too early or with an error; the message has the end of its output."""


class Target:
    """One launch of a target; leaving its context kills it if it still runs.

    Args:
        settings: Of the run.
        variables: More of its environment.
    """

    def __init__(
        self,
        settings: TargetSettings,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = Path(settings.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = Reader(self.folder / "journal.jsonl")
        self.number = len([line for line in self.journal.refresh() if line["event"] == "launch"])
        self.mark = uuid.uuid4().hex
        self.scratch = Path(tempfile.mkdtemp(prefix="lrl-chaos-"))
        self.output = self.folder / f"output-{self.number}.log"
        self.started = time.time()
        self._shared_before = set(os.listdir(SHM))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, MARK: self.mark, "TMPDIR": str(self.scratch)}
        self.environment = os.environ | own | (variables or {})
        self.words = [sys.executable, "-m", "benchmarks.chaos.target", *settings.words]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                self.words,
                cwd=ROOT,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def lines(self, event: str) -> list[Line]:
        self.journal.refresh()
        return [line for line in self.journal.of(event) if line["launch"] == self.number]

    def wait_for(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Waits until `condition` holds.

        Raises:
            Ended: The process has ended.
            TimeoutError: It does not hold within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise Ended(
                    self._error(f"ended with exit status {self.process.returncode} before {what}")
                )
            if time.monotonic() > deadline:
                raise TimeoutError(self._error(f"did not get to {what} within {timeout_s:g} s"))
            time.sleep(LOOK_S)

    def wait(self, timeout_s: float) -> None:
        """Waits for its good end.

        Raises:
            Ended: It ended with an error.
            TimeoutError: It runs after `timeout_s` seconds.
        """
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(self._error(f"did not end within {timeout_s:g} s")) from error
        if status:
            raise Ended(self._error(f"ended with exit status {status}"))

    def kill(self) -> None:
        """Sends SIGKILL to the trainer's process alone; the other processes notice by
        themselves."""
        self.process.kill()
        self.process.wait()

    def leftovers(self) -> dict[str, object]:
        """Returns what is left of an ended target, after `GONE_S` seconds or as soon as nothing is,
        and removes its temporary folder.

        Returns:
            `gone_s` until the last process and file in shared memory went, or None; `processes` and
            `shared` that stayed, by name; `temporary_files` in its temporary folder, except torch's
            cache.
        """
        ended, gone_s = time.monotonic(), None
        while (left := {"processes": self._living(), "shared": self._shared()}) != NOTHING:
            if time.monotonic() > ended + GONE_S:
                break
            time.sleep(LOOK_S)
        else:
            gone_s = round(time.monotonic() - ended, 1)
        names = sorted(path.name for path in self.scratch.iterdir())
        shutil.rmtree(self.scratch)
        temporary = [name for name in names if not name.startswith(TORCHS_CACHE)]
        return {"gone_s": gone_s, **left, "temporary_files": temporary}

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

    def _error(self, what: str) -> str:
        tail = "\n".join(self.output.read_text(errors="replace").splitlines()[-20:])
        return f"Launch {self.number} of the target {what}. The end of {self.output}:\n{tail}"


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
