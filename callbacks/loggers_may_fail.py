"""A logger that fails does not end the run. Every run has this callback, whoever builds its Trainer.

Lightning calls its loggers from many places and lets their errors through. TensorBoard's writer is a thread: when it
dies of a full disk, every later call raises its error again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import lightning as L
from lightning.pytorch.loggers import Logger

from lrl.runtime.best_effort import may_not_log

METHODS = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")


class LoggersMayFail(L.Callback):
    """Turns the first OSError of each logger into a warning, and passes over the later ones."""

    def __init__(self) -> None:
        self._guarded: list[Logger] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Guard the trainer's loggers. Their class stays what it is: others look for it."""
        for logger in trainer.loggers:
            if logger not in self._guarded:
                self._guarded.append(logger)
                for method in METHODS:
                    setattr(logger, method, _guarded(logger, getattr(logger, method)))


def _guarded(logger: Logger, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with may_not_log(logger):
            return method(*args, **kwargs)

    return call
