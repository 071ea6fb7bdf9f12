"""Times of a step by cause, and the speed of both sides. A step ends after its sync."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning as L

from lrl.callbacks.base import NonzeroCounts, OnRankZero, find, run_of
from lrl.system.stopwatch import GENERATOR, SYNC, TRAINER, WAITS, shares

if TYPE_CHECKING:
    from lrl.run import Run

FLEET_COUNTS = ("restarts", "reissued", "moved", "joined", "left")


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step, up to its end; wait, train and sync add up to step."""

    trainer: dict[str, float] = field(default_factory=dict)
    """Seconds of the trainer by state (`lrl.system.stopwatch.TRAINER`)."""
    generators: dict[str, float] = field(default_factory=dict)
    """Generator-seconds by state (`lrl.system.stopwatch.GENERATOR`)."""
    sync_pause: float = 0.0
    """Pause of the generators for a sync."""
    generated_tokens: int = 0
    """Tokens that the generators wrote in it."""

    @property
    def generated_tokens_per_s(self) -> float:
        return self.generated_tokens / self.step

    @property
    def step(self) -> float:
        return sum(self.trainer.values())

    @property
    def wait(self) -> float:
        """The trainer's wait for finished groups."""
        return sum(self.trainer.get(state, 0.0) for state in WAITS)

    @property
    def sync(self) -> float:
        """The trainer's time for moving weights and waiting until the sync before has ended."""
        return sum(self.trainer.get(state, 0.0) for state in SYNC)

    @property
    def train(self) -> float:
        """The rest: packing, a reference's log-probs, forward, backward, optimizer, callbacks."""
        return self.step - self.wait - self.sync

    def add(self, other: StepTimes) -> None:
        for mine, its in ((self.trainer, other.trainer), (self.generators, other.generators)):
            for state, seconds in its.items():
                mine[state] = mine.get(state, 0.0) + seconds
        self.sync_pause += other.sync_pause
        self.generated_tokens += other.generated_tokens


def times_of(trainer: L.Trainer) -> StepTimes:
    """Returns the times of the step that ended last."""
    throughput = find(trainer, Throughput)
    assert throughput is not None, "every run has one (`default_callbacks`)"
    return throughput.times


class Throughput(OnRankZero):
    """Logs `time/*`, `trainer/*`, `generators/*`, `throughput/*`, `fleet/*` and `weights/*` every
    step. Every run has it: other callbacks read its times."""

    times: StepTimes

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begins the first step, after everything before it."""
        self._totals = Counter[str]()
        self._counts = NonzeroCounts()
        run = run_of(trainer)
        run.stopwatch.enter("train")
        self._lap(run)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        run = run_of(trainer)
        times = self.times = self._lap(run)
        times.sync_pause = run.pause_seconds if times.sync else 0.0
        syncs = run.syncs.values()
        totals = Counter(
            generated=run.calls.controller.generated_tokens,
            recomputed=sum(sync.recomputed_tokens for sync in syncs),
            fetched=sum(sync.transport.fetched_bytes for sync in syncs),
            sent=sum(sync.transport.sent_bytes for sync in syncs),
        )
        new = totals - self._totals
        self._totals = totals
        times.generated_tokens = new["generated"]
        seconds = ("step", "wait", "train", "sync", "sync_pause")
        pl_module.log_dict(
            {f"time/{name}": getattr(times, name) for name in seconds}
            | {f"trainer/{state}": one for state, one in shares(times.trainer, TRAINER).items()}
            | {
                f"generators/{name}": one
                for name, one in shares(times.generators, GENERATOR).items()
            }
            | {
                "throughput/generated_tokens_per_s": times.generated_tokens_per_s,
                "throughput/trained_tokens_per_s": run.step_stream.num_tokens / times.step,
                "generators/recomputed_tokens": float(new["recomputed"]),
                "fleet/alive": float(run.fleet.alive),
            }
            | self._counts.to_log(
                {f"fleet/{name}": getattr(run.fleet, name) for name in FLEET_COUNTS}
                | {f"weights/{name}_bytes": new[name] for name in ("fetched", "sent")}
            ),
            batch_size=1,
        )

    def _lap(self, run: Run) -> StepTimes:
        trainer = run.stopwatch.lap()
        lap = run.fleet.rollouts.lap()
        return StepTimes(trainer, run.fleet.call(lap, "reading the generators' stopwatches"))
