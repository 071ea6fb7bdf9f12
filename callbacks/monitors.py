"""Calls to Lightning's ModelCheckpoint and EarlyStopping at the steps where their metric is new.

Lightning calls them after a validation loop or at the end of an epoch. Here evaluations run during
the training and end at any step, and an epoch may be longer than the run. So a callback that
monitors `eval/...` is called after each finished evaluation, and an EarlyStopping on another metric
after every step that logs it.

Rewards and evaluations are known on rank 0 alone, but all ranks save and stop together: rank 0
broadcasts the values.
"""

import logging
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lrl.callbacks.base import NewMetrics
from lrl.system.import_by_name import did_you_mean

log = logging.getLogger(__name__)

EVALUATION = "eval/"
"""Prefix of an evaluation's metrics."""
Monitor = ModelCheckpoint | EarlyStopping


class Monitors(L.Callback):
    """Calls the callbacks that monitor a metric when it is new. Every run has it, on every rank."""

    def __init__(self) -> None:
        self._monitors: list[Monitor] = []
        self._metrics = NewMetrics()
        self._looked = False

    def prepare(self, trainer: L.Trainer) -> None:
        """Finds the callbacks with a monitor, before their `setup` decides when they are called."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._monitors = [one for one in callbacks if isinstance(one, Monitor) and one.monitor]
        for one in self._monitors:
            if isinstance(one, EarlyStopping):
                # Unset, Lightning checks at an epoch's end; only a user who asked for that gets it.
                one._check_on_train_epoch_end = bool(one._check_on_train_epoch_end)
            elif _of_evaluation(one):
                one._save_on_train_epoch_end = bool(one._save_on_train_epoch_end)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Takes note of the first evaluation, of the policy before its first step."""
        self._metrics.read(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        """Calls the monitors of what the step, and the evaluations that ended in it, have logged."""
        if not self._looked and trainer.is_global_zero:
            self._looked = True
            self._warn_of_unknown(trainer)
        for one in self._with_new_metric(trainer):
            if isinstance(one, EarlyStopping) or _of_evaluation(one):
                one.on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Calls the ModelCheckpoints for the policy after its last step, which may be the best."""
        for one in self._with_new_metric(trainer):
            if isinstance(one, ModelCheckpoint) and _of_evaluation(one):
                one.on_validation_end(trainer, pl_module)

    def _warn_of_unknown(self, trainer: L.Trainer) -> None:
        """Warns of metrics that Lightning would wait for in silence."""
        shown = trainer.callback_metrics
        for one in self._monitors:
            if one.monitor not in shown:
                near = did_you_mean(str(one.monitor), shown)
                text = "%s.monitor is %r, which the first step has not logged.%s"
                log.warning(text, type(one).__name__, one.monitor, near)

    def _with_new_metric(self, trainer: L.Trainer) -> list[Monitor]:
        """Gives every rank the monitored metrics that are new; returns their monitors."""
        if not self._monitors:
            return []
        names = {one.monitor for one in self._monitors}
        metrics = self._metrics.read(trainer)
        here = {name: value.item() for name, value in metrics.items() if name in names}
        new: dict[str, float] = trainer.strategy.broadcast(here)
        if not trainer.is_global_zero:
            trainer.callback_metrics.update({name: torch.tensor(new[name]) for name in new})
        return [one for one in self._monitors if one.monitor in new]


def _of_evaluation(monitor: Monitor) -> bool:
    return str(monitor.monitor).startswith(EVALUATION)
