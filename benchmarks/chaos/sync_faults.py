"""The faults of `benchmarks.chaos.sync`, and the callback that brings one to each sync and writes down what came of it.

A fault of which the plan says that it takes its generator out waits until all generators serve, and the others go on
with the one that is left meanwhile; so the whole plan takes a few restarts and not the sum of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, get_args

import lightning as L

from benchmarks.chaos.full_memory import full_memory
from benchmarks.chaos.proxy import Fault, Kind, Proxy
from lrl.callbacks import WeightSync
from lrl.generators.generator import Generator

INIT, PROBE, STAGE = "/init_weight_transfer_engine", "probe", "stage"
UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
ON_THE_WAY: tuple[Kind, ...] = get_args(Kind)[:6]
TAKING_OUT: tuple[Kind, ...] = ("cut", "refused", "silent", "lie")
"""A resume or a probe that only comes late reaches a generator that is out already."""
UNHEARD: tuple[Kind, ...] = ("silent", "late")
"""Who does not answer when it is told to pause stands still."""
STAYS = 1_000_000
"""Requests: more than there are."""
WAIT_S = 300.0
"""For a lost generator to come back."""
SIGNS = {
    "does not compute": "probe",
    "checksum": "checksum",
    "staging the weights": "no room",
    "No heartbeat": "heartbeat",
    "a response says that": "versions of an answer",
    "did not answer within": "deadline",
    " answered ": "HTTP status",
    " failed: ": "connection",
    "its process has ended": "process",
}
"""What stands in the log when something is noticed, and the word for it."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One fault of the plan.

    Args:
        phase: The route, `probe`, or `stage`, which is the trainer's own part and hits all generators.
        kind: See `benchmarks.chaos.proxy.KINDS`; of `stage`, `full` or `fills up`.
        stays: Whether it stays until the generator is out.
        takes_out: Whether the generator is expected to be replaced.
    """

    phase: str
    kind: str
    stays: bool = False
    takes_out: bool = False


@dataclass(kw_only=True)
class Outcome:
    """What came of a fault.

    Args:
        phase: As planned.
        kind: As planned.
        stays: As planned.
        version: Of the sync that it hit.
        hits: Requests it hit.
        detected_by: What noticed it; None if nothing did.
        detected_s: Seconds from its first hit until then.
        outcome: `taken out`, `retried`, `other way` or `no effect`.
        sync_s: Seconds of the whole sync, its proof included.
        said: The first line that was logged.
    """

    phase: str
    kind: str
    stays: bool
    version: int
    hits: int
    detected_by: str | None
    detected_s: float | None
    outcome: str
    sync_s: float
    said: str

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def make_plan() -> list[Planned]:
    """Every phase with every kind once, and three faults that stay."""
    plan = [
        Planned(phase=phase, kind=kind, takes_out=phase == "/pause" and kind in UNHEARD)
        for kind in ON_THE_WAY
        for phase in [INIT, *UPDATE]
    ]
    plan += [Planned(phase="/update_weights", kind="damaged")]
    plan += [Planned(phase=STAGE, kind=kind) for kind in ("full", "fills up")]
    plan += [Planned(phase="/update_weights", kind="replaced", takes_out=True)]
    plan += [Planned(phase=phase, kind=kind, takes_out=True) for kind in TAKING_OUT for phase in ("/resume", PROBE)]
    stay = {"/pause": "cut", "/update_weights": "refused", "/finish_weight_update": "silent"}
    return plan + [Planned(phase=phase, kind=kind, stays=True, takes_out=True) for phase, kind in stay.items()]


class LogLines(logging.Handler):
    """Keeps lrl's warnings with their time, in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.lines.append((time.monotonic(), record.getMessage()))


class BreakingSync(WeightSync):
    """A `WeightSync` whose every sync meets the next fault of a plan.

    Args:
        plan: The faults.
        proxies: One before each generator, by its number.
        settle_s: Seconds that the run waits for a fault to show that the sync itself did not notice.
        **settings: Of `WeightSync`.
    """

    def __init__(self, plan: Sequence[Planned], proxies: dict[int, Proxy], settle_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.left = list(plan)
        self.outcomes: list[Outcome] = []
        self._proxies, self._settle_s = proxies, settle_s
        self._log = LogLines()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen to what lrl says."""
        super().setup(trainer, pl_module, stage)
        logging.getLogger("lrl").addHandler(self._log)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen no more."""
        super().teardown(trainer, pl_module, stage)
        logging.getLogger("lrl").removeHandler(self._log)

    def sync(self, trainer: L.Trainer, policy: Any) -> None:
        """Sync, and meet a fault on the way if one is left that suits what is there."""
        fleet = trainer.datamodule.fleet  # type: ignore[attr-defined]
        self.wait_until_verified(trainer, fleet.rollouts)
        fleet._backoffs.clear()  # a generator that is lost every minute by plan would stay away for five minutes
        self._wait_if_nothing_suits(fleet)
        chosen = self._choose(fleet, trainer.global_step)
        if chosen is None:
            super().sync(trainer, policy)
            return
        planned, target = chosen
        self.left.remove(planned)
        fault = Fault(planned.phase, planned.kind, STAYS if planned.stays else 1)  # type: ignore[arg-type]
        self._log.lines.clear()
        started = time.monotonic()
        with self._armed(planned, fault, target):
            super().sync(trainer, policy)
            self.wait_until_verified(trainer, fleet.rollouts)
            if len(fleet.rollouts.serving) < len(fleet.rollouts.generators):  # a waiting trainer does as much
                super().sync(trainer, policy)
            sync_s = time.monotonic() - started
            self._wait_for_a_sign(planned, target)
        self.outcomes.append(self._judge(planned, fault, target, trainer.global_step, sync_s))

    def _choose(self, fleet: Any, version: int) -> tuple[Planned, Generator] | None:
        """The next fault that can be met by the sync to come, and the generator that meets it."""
        pool = fleet.rollouts
        new = [*pool.pending, *(generator for generator in pool.generators if generator.version < 0)]
        if new:
            return next(((planned, new[-1]) for planned in self.left if planned.phase == INIT), None)
        serving = pool.serving
        if version == self.version or not serving:
            return None
        all_serve = len(serving) == len(self._proxies)
        fitting = [fault for fault in self.left if fault.phase != INIT and (all_serve or not fault.takes_out)]
        fitting.sort(key=lambda fault: not fault.takes_out)  # those first: the others fill the wait for a replacement
        return (fitting[0], serving[version % len(serving)]) if fitting else None

    def _wait_if_nothing_suits(self, fleet: Any) -> None:
        """With only such faults left that need all generators, wait until the lost one is back."""
        pool, end = fleet.rollouts, time.monotonic() + WAIT_S
        waits = [fault for fault in self.left if fault.phase == INIT or fault.takes_out]
        while waits and len(waits) == len(self.left) and not pool.pending and self._some_out(pool):
            if time.monotonic() > end:
                raise TimeoutError(f"No generator came back within {WAIT_S:g} s: {pool.last_loss}")
            time.sleep(0.2)

    def _some_out(self, pool: Any) -> bool:
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
        """A request that arrives late, or that never arrived, may show only behind the sync; so does a probe.

        Who is to be taken out is waited for: the log says so a moment before it is done.
        """
        end = time.monotonic() + self._settle_s
        while time.monotonic() < end and target.eviction is None:
            if planned.kind != "late" and not planned.takes_out and self._said_of(planned, target):
                return
            time.sleep(0.1)

    def _said_of(self, planned: Planned, target: Generator) -> list[tuple[float, str]]:
        """The lines about this fault; meanwhile another generator may come back, and say so."""
        if planned.phase == STAGE:
            return [line for line in self._log.lines if "staging" in line[1]]
        return [line for line in self._log.lines if target.name in line[1].lower()]

    def _judge(self, planned: Planned, fault: Fault, target: Generator, version: int, sync_s: float) -> Outcome:
        lines = self._said_of(planned, target)
        attempts = sum("attempt" in line for _, line in lines)
        first = lines[0] if lines and fault.hits else None
        return Outcome(
            phase=planned.phase,
            kind=planned.kind,
            stays=planned.stays,
            version=version,
            hits=len(fault.hits),
            detected_by=next((word for sign, word in SIGNS.items() if sign in first[1]), "log") if first else None,
            detected_s=round(first[0] - fault.hits[0], 2) if first else None,
            outcome="taken out" if target.eviction else ("no effect", "retried", "other way")[min(attempts, 2)],
            sync_s=round(sync_s, 2),
            said=first[1].splitlines()[0][:300] if first else "",
        )
