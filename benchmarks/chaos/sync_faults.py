"""The faults of `benchmarks.chaos.sync`, and the callback that brings one to each sync and records
its outcome.

A fault that should evict its generator waits until all generators serve; the other faults meanwhile
hit the generator that is left. So the restarts of generators overlap with the rest of the plan.
"""

from __future__ import annotations

import logging
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import lightning as L

from benchmarks.arguments import Row
from benchmarks.chaos.proxy import Fault, Kind, Proxy
from lrl.callbacks import WeightSync
from lrl.callbacks.base import run_of
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.run import Run
from lrl.system import job_supervisor
from lrl.weights import staged_file

INIT = "/init_weight_transfer_engine"
PROBE = "probe"
STAGE = "stage"
UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
ON_THE_WAY: tuple[Kind, ...] = get_args(Kind)[:6]
TAKING_OUT: tuple[Kind, ...] = ("cut", "refused", "silent", "lie")
"""A resume or a probe that only comes late reaches a generator that is evicted already."""
UNHEARD: tuple[Kind, ...] = ("silent", "late")
"""A generator that does not answer a pause writes nothing."""
STAYS = 1_000_000
"""Number of requests: more than there are."""
WAIT_S = 300.0
"""For a lost generator to come back."""
STAGING, ATTEMPT = "staging the weights", "attempt"
SIGNS = {
    "does not compute": "probe",
    "checksum": "checksum",
    STAGING: "no room",
    "No heartbeat": "heartbeat",
    "a response says that": "versions of an answer",
    "did not answer within": "deadline",
    " answered ": "HTTP status",
    " failed: ": "connection",
    "its process has ended": "process",
}
"""Parts of a log line that reports a fault, and the word for what noticed it. Only the log has the
cause and the time of a failure that another attempt repairs, so these are texts of lrl's
messages."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One fault of the plan."""

    phase: str
    """The route, `probe`, or `stage`, which is the trainer's own part and hits all generators."""
    kind: str
    """See `benchmarks.chaos.proxy.Kind`; of `stage`, `full` or `fills up`."""
    stays: bool = False
    """Whether it stays until the generator is out."""
    takes_out: bool = False
    """Whether the generator is expected to be replaced."""


def make_plan() -> list[Planned]:
    """Plans each fault that the sync itself finds; `benchmarks.detection` has those that only a proof
    can see, and whose tokens are trained until then."""
    plan = [
        Planned(phase=phase, kind=kind, takes_out=phase == "/pause" and kind in UNHEARD)
        for kind in ON_THE_WAY
        for phase in [INIT, *UPDATE]
        if (phase, kind) != ("/update_weights", "lie")
    ]
    plan += [Planned(phase="/update_weights", kind="damaged")]
    plan += [Planned(phase=STAGE, kind=kind) for kind in ("full", "fills up")]
    plan += [
        Planned(phase=phase, kind=kind, takes_out=True)
        for kind in TAKING_OUT
        for phase in ("/resume", PROBE)
    ]
    stay = {"/pause": "cut", "/update_weights": "refused", "/finish_weight_update": "silent"}
    return plan + [
        Planned(phase=phase, kind=kind, stays=True, takes_out=True) for phase, kind in stay.items()
    ]


@contextmanager
def full_memory(notice: bool) -> Iterator[None]:
    """Has weights staged where no room is, for this process alone.

    Args:
        notice: Whether the check of free space finds none; if not, the write itself runs out of
            room, on a file system of one MiB, whose mount needs root.
    """
    if notice:
        with mock.patch.object(staged_file, "require_room", _refuse):
            yield
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lrl-full-")))
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
        subprocess.run(mount, check=True)
        stack.callback(subprocess.run, ["umount", str(folder)], check=True)
        stack.enter_context(mock.patch.object(staged_file, "SHARED_MEMORY", folder))
        # No setting of lrl leaves out its check.
        stack.enter_context(mock.patch.object(staged_file, "require_room"))
        yield


def _refuse(folder: Path, needed: int) -> None:
    if folder.is_relative_to(staged_file.SHARED_MEMORY):
        raise OSError(f"{folder} has 0 bytes free")


@contextmanager
def short_backoffs() -> Iterator[None]:
    with mock.patch.object(job_supervisor, "LONGEST_BACKOFF_S", job_supervisor.FIRST_BACKOFF_S):
        yield


class LogLines(logging.Handler):
    """Keeps lrl's warnings with their time, in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))


class BreakingSync(WeightSync):
    """A `WeightSync` that injects the next fault of a plan into each sync, by the proxy in front of
    a generator. For signs of a fault that the sync itself did not notice it waits `settle_s`."""

    def __init__(
        self, plan: Sequence[Planned], proxies: dict[int, Proxy], settle_s: float, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.left = list(plan)
        self.outcomes: list[Row] = []
        """Of each fault; see `_judge`."""
        self._proxies = proxies
        self._settle_s = settle_s
        self._log = LogLines()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logging.getLogger("lrl").addHandler(self._log)
        run = run_of(trainer)
        run.sync = partial(self._sync, run, run.sync)  # type: ignore[method-assign]
        super().on_train_start(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        logging.getLogger("lrl").removeHandler(self._log)

    def _sync(self, run: Run, sync: Callable[[], None]) -> None:
        pool, version = run.fleet.rollouts, run.trainer.global_step
        run.syncs.wait(pool)
        self._wait_if_nothing_suits(pool)
        chosen = self._choose(pool, version, newest=run.version)
        if chosen is None:
            sync()
            return
        planned, target = chosen
        self.left.remove(planned)
        fault = Fault(planned.phase, planned.kind, STAYS if planned.stays else 1)  # type: ignore[arg-type]
        self._log.lines.clear()
        started = time.monotonic()
        with self._armed(planned, fault, target):
            sync()
            run.syncs.wait(pool)
            if len(pool.serving) < len(pool.generators):  # a waiting trainer does as much
                sync()
            sync_s = time.monotonic() - started
            self._wait_for_a_sign(planned, target)
        self.outcomes.append(self._judge(planned, fault, target, version, sync_s))

    def _choose(
        self, pool: GeneratorPool, version: int, newest: int
    ) -> tuple[Planned, Generator] | None:
        new = [
            *pool.pending,
            *(generator for generator in pool.generators if generator.version < 0),
        ]
        if new:
            return next(
                ((planned, new[-1]) for planned in self.left if planned.phase == INIT), None
            )
        serving = pool.serving
        if version == newest or not serving:
            return None
        all_serve = len(serving) == len(self._proxies)
        fitting = [
            fault
            for fault in self.left
            if fault.phase != INIT and (all_serve or not fault.takes_out)
        ]
        # Those first: the others fill the wait for a replacement.
        fitting.sort(key=lambda fault: not fault.takes_out)
        return (fitting[0], serving[version % len(serving)]) if fitting else None

    def _wait_if_nothing_suits(self, pool: GeneratorPool) -> None:
        end = time.monotonic() + WAIT_S
        waits = [fault for fault in self.left if fault.phase == INIT or fault.takes_out]
        while waits and len(waits) == len(self.left) and not pool.pending and self._some_out(pool):
            if time.monotonic() > end:
                raise TimeoutError(f"No generator came back within {WAIT_S:g} s: {pool.last_loss}")
            time.sleep(0.2)

    def _some_out(self, pool: GeneratorPool) -> bool:
        return 0 < len(pool.generators) < len(self._proxies)

    @contextmanager
    def _armed(self, planned: Planned, fault: Fault, target: Generator) -> Iterator[None]:
        if planned.phase == STAGE:
            fault.hits.append(time.monotonic())
            with full_memory(notice=planned.kind == "full"):
                yield
            return
        proxy = self._proxies[target.server.number]
        proxy.fault = fault
        try:
            yield
        finally:
            proxy.fault = None

    def _wait_for_a_sign(self, planned: Planned, target: Generator) -> None:
        """Waits for a log line about the fault: a late or lost request, or a probe, may show only
        after the sync.

        An eviction is waited for: the log reports it a moment before it is done.
        """
        end = time.monotonic() + self._settle_s
        while time.monotonic() < end and target.eviction is None:
            if planned.kind != "late" and not planned.takes_out and self._said_of(planned, target):
                return
            time.sleep(0.1)

    def _said_of(self, planned: Planned, target: Generator) -> list[tuple[float, str]]:
        """Returns the log lines about this fault; the return of another generator may be logged in
        between."""
        if planned.phase == STAGE:
            return [line for line in self._log.lines if STAGING in line[1]]
        return [line for line in self._log.lines if target.name in line[1].lower()]

    def _judge(
        self, planned: Planned, fault: Fault, target: Generator, version: int, sync_s: float
    ) -> Row:
        """Returns the fault, the version of the sync that it hit, how many requests it hit, who
        noticed it and after how many seconds, the outcome (`taken out`, `retried`, `other way` or
        `no effect`), the seconds of the sync, and the first line of the log about it."""
        lines = self._said_of(planned, target)
        attempts = sum(ATTEMPT in line for _, line in lines)
        found = {
            "phase": planned.phase,
            "kind": planned.kind,
            "stays": planned.stays,
            "version": version,
            "hits": len(fault.hits),
            "detected_by": None,
            "detected_s": None,
            "outcome": ("no effect", "retried", "other way")[min(attempts, 2)],
            "sync_s": round(sync_s, 2),
            "said": "",
        }
        if target.eviction:
            found["outcome"] = "taken out"
        if lines and fault.hits:
            at, said = lines[0]
            found["detected_by"] = next((by for sign, by in SIGNS.items() if sign in said), "log")
            found["detected_s"] = round(at - fault.hits[0], 2)
            found["said"] = said.splitlines()[0][:300]
        return found
