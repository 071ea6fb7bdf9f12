"""Has Lightning's ModelCheckpoint and EarlyStopping look at a run's figures when there are new ones.

Lightning looks behind a validation loop or at the end of an epoch. Here evaluations run beside the training and end at
any step, and an epoch may be longer than the run. So whoever monitors `eval/...` looks at each finished evaluation, and
an EarlyStopping that monitors another figure looks behind every step that logs it.

Rewards and evaluations are known on rank 0 alone, but all ranks save and stop together: rank 0 tells the others.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lrl.callbacks.logged import Logged
from lrl.runtime.config_errors import ConfigError

EVALUATION = "eval/"
"""Figures of evaluations begin with it."""

Watcher = ModelCheckpoint | EarlyStopping


class Monitors(L.Callback):
    """Calls the callbacks that monitor a figure when it is new. Every run has it, on every rank."""

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []
        self._logged = Logged()

    def prepare(self, trainer: L.Trainer) -> None:
        """Find who monitors what, before Lightning decides in their `setup` when they look."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._watchers = [one for one in callbacks if isinstance(one, Watcher) and one.monitor is not None]
        for one in self._watchers:
            if isinstance(one, EarlyStopping):
                # Left out, Lightning takes the end of an epoch. Whoever asked for that in so many words gets it.
                one._check_on_train_epoch_end = bool(one._check_on_train_epoch_end)
            elif str(one.monitor).startswith(EVALUATION):
                one._save_on_train_epoch_end = bool(one._save_on_train_epoch_end)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first evaluation is there: say what there is to monitor if somebody asks for something else.

        Raises:
            ValueError: A monitored figure of an evaluation is none that the run's evaluations give.
        """
        shown = self._logged.look(trainer)
        for one in self._watchers if trainer.is_global_zero else ():
            if str(one.monitor).startswith(EVALUATION) and one.monitor not in shown:
                known = ", ".join(sorted(name for name in shown if name.startswith(EVALUATION)))
                raise ConfigError(
                    f"{type(one).__name__}.monitor is {one.monitor!r}, which no evaluation of this run gives. There is "
                    f"{known or 'no evaluation: add lrl.callbacks.Evaluation'}."
                )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Show what the step and the evaluations that ended in it have logged."""
        new = self._tell(trainer)
        for one in self._watchers:
            if one.monitor in new and (isinstance(one, EarlyStopping) or str(one.monitor).startswith(EVALUATION)):
                one.on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The policy after its last step is judged, too: it may be the best."""
        new = self._tell(trainer)
        for one in self._watchers:
            if isinstance(one, ModelCheckpoint) and one.monitor in new and str(one.monitor).startswith(EVALUATION):
                one.on_validation_end(trainer, pl_module)

    def _tell(self, trainer: L.Trainer) -> set[str]:
        """Give every rank the monitored figures that are new; their names."""
        if not self._watchers:
            return set()
        names = {one.monitor for one in self._watchers}
        here = {name: value.item() for name, value in self._logged.look(trainer).items() if name in names}
        new: dict[str, float] = trainer.strategy.broadcast(here)
        if not trainer.is_global_zero:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in new.items()})
        return set(new)
