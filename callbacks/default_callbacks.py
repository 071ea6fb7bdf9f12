"""The callbacks of each rank (`PolicyModule.configure_callbacks`): those that no run is without, those that only rank 0
has, and the order of lrl's own, whichever order a user gives them in."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import ProgressBar

from lrl.callbacks.base import OnRankZero, find
from lrl.callbacks.elastic import Elastic
from lrl.callbacks.evaluation import Evaluation
from lrl.callbacks.export import Export
from lrl.callbacks.health import Health
from lrl.callbacks.last_checkpoint import LastCheckpoint
from lrl.callbacks.loggers_may_fail import LoggersMayFail
from lrl.callbacks.monitors import Monitors
from lrl.callbacks.rollout_log import RolloutLog
from lrl.callbacks.summary import Summary
from lrl.callbacks.throughput import Throughput
from lrl.callbacks.timeline import Timeline
from lrl.callbacks.weight_sync import WeightSync
from lrl.strategies.generator_devices import GeneratorDevices

ORDER: tuple[type[L.Callback], ...] = (
    *(WeightSync, Evaluation, RolloutLog, Throughput),  # an evaluation asks for the version that was synced before it
    *(Timeline, Elastic, Health, ProgressBar, Export, Summary),  # they read what those above have measured
)


def default_callbacks(trainer: L.Trainer) -> list[L.Callback]:
    """Those that the trainer does not have yet and needs; what is only for rank 0 is taken from any other."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if not trainer.is_global_zero:
        callbacks[:] = [callback for callback in callbacks if not isinstance(callback, OnRankZero)]
    elif isinstance(trainer.strategy, GeneratorDevices) and find(trainer, WeightSync) is None:
        callbacks.insert(0, WeightSync())  # without it the generators would answer with the first weights for ever
    put_in_order(callbacks)
    monitors = find(trainer, Monitors) or Monitors()
    monitors.prepare(trainer)
    needed = [find(trainer, LoggersMayFail) or LoggersMayFail(), find(trainer, LastCheckpoint) or LastCheckpoint()]
    return [one for one in (*needed, monitors) if one not in callbacks]


def put_in_order(callbacks: list[L.Callback]) -> None:
    """Sort lrl's own, and any progress bar, by moving some of them forward.

    So a user's callback is still behind all that it was put behind, and finds what they have logged.
    """
    ordered: list[L.Callback] = []
    for callback in callbacks:
        behind = (place for place, other in enumerate(ordered) if _rank(other) > _rank(callback) >= 0)
        ordered.insert(next(behind, len(ordered)), callback)
    callbacks[:] = ordered


def _rank(callback: L.Callback) -> int:
    """The place in `ORDER`, or -1 for another's."""
    return next((rank for rank, kind in enumerate(ORDER) if isinstance(callback, kind)), -1)
