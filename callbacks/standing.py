"""The callbacks of each rank: some no run is without, and some only rank 0 has (`PolicyModule.configure_callbacks`)."""

from __future__ import annotations

import lightning as L

from lrl.callbacks.find import find
from lrl.callbacks.last_checkpoint import LastCheckpoint
from lrl.callbacks.loggers_may_fail import LoggersMayFail
from lrl.callbacks.on_rank_zero import OnRankZero


def standing(trainer: L.Trainer) -> list[L.Callback]:
    """Those that the trainer does not have yet and needs; what is only for rank 0 is taken from any other."""
    if not trainer.is_global_zero:
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, OnRankZero)]
    return [kind() for kind in (LoggersMayFail, LastCheckpoint) if find(trainer, kind) is None]
