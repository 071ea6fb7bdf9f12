"""Callbacks that every run has, callbacks of rank 0 alone, and the order of lrl's own."""

import logging
from itertools import groupby
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from lightning.pytorch.loggers import Logger

from lrl.callbacks.base import FollowRankZero, NewMetrics, OnRankZero, find
from lrl.callbacks.last_checkpoint import LastCheckpoint
from lrl.callbacks.throughput import Throughput
from lrl.callbacks.weight_sync import WeightSync
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system.imports import did_you_mean
from lrl.system.output import may_not_log

log = logging.getLogger(__name__)

ORDER = (
    # An evaluation samples the version that was synced before it.
    "WeightSync",
    "Evaluation",
    "RolloutLog",
    "RolloutFile",
    "Throughput",
    # They read the metrics of the callbacks above.
    "Timeline",
    "Elastic",
    "Health",
    "ProgressBar",
    "Export",
    "Summary",
)
"""Classes of lrl, and any progress bar, by name: a run imports only those that it has."""
LOGGER_METHODS = (
    *("log_metrics", "log_hyperparams", "log_graph", "save", "finalize"),
    "after_save_checkpoint",
)
EVALUATION = "eval/"
"""Prefix of an evaluation's metrics."""
Monitor = ModelCheckpoint | EarlyStopping


def default_callbacks(trainer: L.Trainer) -> list[L.Callback]:
    """Returns the callbacks that the trainer lacks; sorts lrl's own, and leaves rank 0's to it."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if find(trainer, FollowRankZero) is None:  # otherwise an earlier fit has done this
        if isinstance(trainer.strategy, GeneratorDevices):
            of_runs = [kind for kind in (WeightSync, Throughput) if find(trainer, kind) is None]
            callbacks[:0] = [kind() for kind in of_runs]
        put_in_order(callbacks)
        if trainer.world_size > 1:
            let_others_follow(callbacks, trainer.is_global_zero)
    monitors = find(trainer, Monitors) or Monitors()
    monitors.prepare(trainer)
    # After the user's.
    needed: list[L.Callback] = [LoggersMayFail(), LastCheckpoint(), monitors]
    needed += [StopTogether()] if trainer.world_size > 1 else []
    return [one for one in needed if find(trainer, type(one)) is None]


def put_in_order(callbacks: list[L.Callback]) -> None:
    """Sorts lrl's callbacks and any progress bar by moving some of them forward.

    A user's callback stays after all that stood before it, and finds the metrics they logged.
    """
    ordered: list[L.Callback] = []
    for callback in callbacks:
        rank = _rank(callback)
        later = (at for at, other in enumerate(ordered) if _rank(other) > rank >= 0)
        ordered.insert(next(later, len(ordered)), callback)
    callbacks[:] = ordered


def let_others_follow(callbacks: list[L.Callback], leads: bool) -> None:
    """Puts a follower after each row of rank 0's callbacks; on the other ranks, in its place."""
    # Not one for all: a user's callback in between may call a collective, which needs all ranks.
    divided: list[L.Callback] = []
    for of_rank_zero, row in groupby(callbacks, lambda one: isinstance(one, OnRankZero)):
        divided += row if leads or not of_rank_zero else ()
        divided += [FollowRankZero()] if of_rank_zero else []
    for last in [one for one in divided if isinstance(one, FollowRankZero)][-1:]:
        last.last = True
    callbacks[:] = divided


def _rank(callback: L.Callback) -> int:
    """Returns the index in `ORDER`, or -1 for a user's callback."""
    kinds = {
        kind.__name__
        for kind in type(callback).__mro__
        if kind is ProgressBar or kind.__module__.startswith("lrl.callbacks.")
    }
    return next((rank for rank, name in enumerate(ORDER) if name in kinds), -1)


class LoggersMayFail(L.Callback):
    """Turns the first OSError of each logger into a warning and ignores later ones.

    Lightning calls its loggers from many places and lets their errors through. TensorBoard's writer
    is a thread: after it dies of a full disk, every later call raises its error again.
    """

    def __init__(self) -> None:
        self._guarded: list[Logger] = []

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        """Guards the methods of the loggers, and not by a wrapper: others look for their class."""
        for logger in trainer.loggers:
            if logger not in self._guarded:
                self._guarded.append(logger)
                for method in LOGGER_METHODS:
                    setattr(logger, method, may_not_log(logger)(getattr(logger, method)))


class StopTogether(L.Callback):
    """Sets `trainer.should_stop` on all ranks when it is set on one of them. Every run of several
    ranks has it.

    A callback of rank 0 alone (`lrl.callbacks.base.OnRankZero`) may set it. Rank 0 then ended after
    that step, and both waited for hours: the others for its next step, it for them.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        ranks = pl_module.ranks
        trainer.should_stop = ranks.share(any(ranks.gather(trainer.should_stop)))


class Monitors(L.Callback):
    """Calls Lightning's ModelCheckpoint and EarlyStopping at the steps where their metric is new.

    Lightning calls them after a validation loop or at the end of an epoch. Here evaluations run
    during the training and end at any step, and an epoch may be longer than the run. Rewards and
    evaluations are known on rank 0 alone, but all ranks save and stop together: rank 0 broadcasts
    the values.
    """

    def __init__(self) -> None:
        self._monitors: list[Monitor] = []
        self._metrics = NewMetrics()
        self._looked = False

    def prepare(self, trainer: L.Trainer) -> None:
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
