"""Where a step's time went, and how fast both sides are. Put it behind `WeightSync`: it reads the same step's sync."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import lightning as L

from lrl.callbacks.find import find
from lrl.callbacks.weight_sync import WeightSync


@dataclass(slots=True)
class StepTimes:
    """Seconds of one step; wait, train and sync add up to step."""

    step: float = 0.0
    """From the end of the step before to the end of this one."""
    wait: float = 0.0
    """The trainer waited for a finished group."""
    sync: float = 0.0
    """The trainer moved weights, probe included."""
    sync_pause: float = 0.0
    """The generators stood still; part of sync."""

    @property
    def train(self) -> float:
        """The rest: packing, forward, backward, optimizer, callbacks."""
        return max(0.0, self.step - self.wait - self.sync)


class Throughput(L.Callback):
    """Logs `time/*`, `throughput/*` and `fleet/*` every step."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self.generated_tokens_per_s = 0.0
        self._ended = 0.0
        self._generated = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first step begins when everything before it is done."""
        self._ended = time.monotonic()
        self._generated = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Attribute the step that has just ended."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        sync = find(trainer, WeightSync)
        now, generated = time.monotonic(), data.controller.generated_tokens
        self.times = StepTimes(
            step=now - self._ended,
            wait=data.step_stream.wait_s,
            sync=sync.seconds if sync else 0.0,
            sync_pause=sync.pause_seconds if sync else 0.0,
        )
        self.generated_tokens_per_s = (generated - self._generated) / self.times.step
        self._ended, self._generated = now, generated
        pl_module.log_dict(
            {
                "time/step": self.times.step,
                "time/wait": self.times.wait,
                "time/train": self.times.train,
                "time/sync": self.times.sync,
                "time/sync_pause": self.times.sync_pause,
                "throughput/generated_tokens_per_s": self.generated_tokens_per_s,
                "throughput/trained_tokens_per_s": data.step_stream.num_tokens / self.times.step,
                "fleet/alive": float(data.fleet.alive),
                "fleet/restarts": float(data.fleet.restarts),
                "fleet/reissued": float(data.fleet.reissued),
            },
            batch_size=1,
        )
