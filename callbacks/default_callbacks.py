"""Callbacks that every run has, callbacks of rank 0 alone, and the order of lrl's own."""

from itertools import groupby
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger

from lrl.callbacks.base import FollowRankZero, OnRankZero, find
from lrl.callbacks.last_checkpoint import LastCheckpoint
from lrl.callbacks.monitors import Monitors
from lrl.callbacks.weight_sync import WeightSync
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system.best_effort import may_not_log

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


def default_callbacks(trainer: L.Trainer) -> list[L.Callback]:
    """Returns the callbacks that the trainer lacks; sorts lrl's own, and leaves rank 0's to it."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if find(trainer, FollowRankZero) is None:  # otherwise an earlier fit has done this
        if isinstance(trainer.strategy, GeneratorDevices) and find(trainer, WeightSync) is None:
            # Without it the generators would keep the first weights for ever.
            callbacks.insert(0, WeightSync())
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
