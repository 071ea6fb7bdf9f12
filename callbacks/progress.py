"""Progress bar of a run: step, reward, lag, speed, and the trainer's waits."""

from contextlib import ExitStack
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lrl.callbacks.base import find
from lrl.callbacks.throughput import Throughput


class Progress(ProgressBar):
    """One bar over all optimizer steps (Lightning's own counts an epoch's batches), with the times of `Throughput`."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: tqdm[Any] | None = None
        self._above_the_bar = ExitStack()
        self._enabled = True

    def disable(self) -> None:
        """Shows nothing (ranks other than 0)."""
        self._enabled = False

    def enable(self) -> None:
        """Shows the bar."""
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Opens the bar at the step the run begins with."""
        total = trainer.max_steps if trainer.max_steps > 0 else None
        look: dict[str, Any] = {"desc": "step", "unit": "step", "dynamic_ncols": True}
        self._bar = tqdm(total=total, initial=trainer.global_step, disable=not self._enabled, **look)
        self._above_the_bar.enter_context(logging_redirect_tqdm())

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Moves the bar by one step."""
        if self._bar is None:
            return
        metrics = trainer.callback_metrics
        reward, lag = (float(metrics.get(tag, float("nan"))) for tag in ("reward/mean", "policy/lag_mean"))
        shown = {"reward": f"{reward:.2f}", "lag": f"{lag:.1f}"}
        throughput = find(trainer, Throughput)
        if throughput is not None:
            times = throughput.times
            shown["tok/s"] = f"{throughput.generated_tokens_per_s:,.0f}"
            shown["waited"] = f"rollouts {times.wait / times.step:.0%}, sync {times.sync / times.step:.0%}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Closes the bar, which stays on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            self._above_the_bar.close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Closes the bar, so that the error is below it."""
        self.on_train_end(trainer, pl_module)
