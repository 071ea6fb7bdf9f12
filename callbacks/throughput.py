"""Where a step's time went, and how fast both sides are. A step ends behind its sync."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L

from lrl.callbacks.base import OnRankZero, find
from lrl.callbacks.counts import NonzeroCounts
from lrl.callbacks.weight_sync import WeightSync
from lrl.runtime.stopwatch import GENERATOR, SYNC, TRAINER, WAITS, shares


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step, from the end of the one before to its own; wait, train and sync add up to step."""

    trainer: dict[str, float] = field(default_factory=dict)
    """By what the trainer did (`lrl.runtime.stopwatch.TRAINER`)."""
    generators: dict[str, float] = field(default_factory=dict)
    """Generator-seconds by what they did (`lrl.runtime.stopwatch.GENERATOR`)."""
    sync_pause: float = 0.0
    """The generators stood still for a sync."""

    @property
    def step(self) -> float:
        """All of it."""
        return sum(self.trainer.values())

    @property
    def wait(self) -> float:
        """The trainer waited for a finished group."""
        return sum(self.trainer.get(state, 0.0) for state in WAITS)

    @property
    def sync(self) -> float:
        """The trainer moved weights, or waited until the sync before was proved."""
        return sum(self.trainer.get(state, 0.0) for state in SYNC)

    @property
    def train(self) -> float:
        """The rest: packing, handing out, a reference's log-probs, forward, backward, optimizer, callbacks."""
        return self.step - self.wait - self.sync

    def add(self, other: StepTimes) -> None:
        """Count another step's seconds in."""
        for mine, its in ((self.trainer, other.trainer), (self.generators, other.generators)):
            for state, seconds in its.items():
                mine[state] = mine.get(state, 0.0) + seconds
        self.sync_pause += other.sync_pause


class Throughput(OnRankZero):
    """Logs `time/*`, `trainer/*`, `generators/*`, `throughput/*` and `fleet/*` every step."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.generated_tokens_per_s = 0.0
        self._generated = self._recomputed = 0
        self._counts = NonzeroCounts()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first step begins when everything before it is done."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        data.stopwatch.enter("train")
        self._lap(data)
        self._generated = self._recomputed = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Attribute the step that has just ended."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        sync = find(trainer, WeightSync)
        self.times = self._lap(data)
        self.times.sync_pause = sync.pause_seconds if sync and self.times.sync else 0.0
        generated = data.controller.generated_tokens
        self.generated_tokens_per_s = (generated - self._generated) / self.times.step
        self._generated = generated
        recomputed = sync.recomputed_tokens if sync else 0
        figures = self._figures(data) | {"generators/recomputed_tokens": float(recomputed - self._recomputed)}
        self._recomputed = recomputed
        pl_module.log_dict(figures, batch_size=1)

    def _lap(self, data: Any) -> StepTimes:
        trainer = data.stopwatch.lap()
        return StepTimes(trainer, data.fleet.call(data.fleet.rollouts.lap(), "reading the generators' stopwatches"))

    def _figures(self, data: Any) -> dict[str, float]:
        times = self.times
        trainer = {f"trainer/{state}": share for state, share in shares(times.trainer, TRAINER).items()}
        generators = {f"generators/{state}": share for state, share in shares(times.generators, GENERATOR).items()}
        return {
            "time/step": times.step,
            "time/wait": times.wait,
            "time/train": times.train,
            "time/sync": times.sync,
            "time/sync_pause": times.sync_pause,
            **trainer,
            **generators,
            "throughput/generated_tokens_per_s": self.generated_tokens_per_s,
            "throughput/trained_tokens_per_s": data.step_stream.num_tokens / times.step,
            "fleet/alive": float(data.fleet.alive),
            **self._counts.to_log(
                {
                    "fleet/restarts": data.fleet.restarts,
                    "fleet/reissued": data.fleet.reissued,
                    "fleet/moved": data.fleet.moved,
                    "fleet/joined": data.fleet.joined,
                    "fleet/left": data.fleet.left,
                }
            ),
        }
