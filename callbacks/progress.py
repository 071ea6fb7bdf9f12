"""Progress of a run: a bar in a terminal, a plain line every few steps without one."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from logging import getLogger
from math import isfinite
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lrl.callbacks.throughput import StepTimes, times_of
from lrl.errors import at_least

FORMAT = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
LOGGERS = ("", "lightning.pytorch", "lightning.fabric")
"""Loggers with their own handlers: their lines would stand after the bar and not above it."""


class Progress(ProgressBar):
    """One bar over all optimizer steps (Lightning's own counts an epoch's batches), with the times
    of `Throughput`: means over the last `every_n_steps` steps.

    Args:
        every_n_steps: Optimizer steps between two lines, where there is no terminal for a bar.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        super().__init__()
        at_least(1, "Progress", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._bar: tqdm[Any] | None = None
        self._above_the_bar = ExitStack()
        self._enabled = True
        self._first_step = self._last_shown = 0
        self._started = 0.0
        self._recent: deque[StepTimes] = deque(maxlen=every_n_steps)
        """Of the last steps. One step alone says little: often many groups end in one, and none in
        the next."""

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._first_step = self._last_shown = trainer.global_step
        self._started = time.monotonic()
        self._recent.clear()
        if self._enabled and sys.stderr.isatty():
            look: dict[str, Any] = {"desc": "step", "bar_format": FORMAT, "dynamic_ncols": True}
            self._bar = tqdm(total=total_steps(trainer), initial=trainer.global_step, **look)
            loggers = [getLogger(name) for name in LOGGERS]
            self._above_the_bar.enter_context(logging_redirect_tqdm(loggers))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if not self._enabled:  # as on the other ranks, which have no Throughput
            return
        self._recent.append(times_of(trainer))
        step = trainer.global_step
        if self._bar is not None:
            shown = ", ".join(facts(trainer, self._recent))
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(1)
        elif step == self._first_step + 1 or step % self.every_n_steps == 0:
            self._write_line(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Closes the bar, which stays on the screen; or writes the line of the last step."""
        if self._bar is None and trainer.global_step != self._last_shown:
            self._write_line(trainer)
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Closes the bar, so that the error is below it."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._above_the_bar.close()

    def _write_line(self, trainer: L.Trainer) -> None:
        if not self._enabled:
            return
        step, total = trainer.global_step, total_steps(trainer)
        self._last_shown = step
        left = ""
        if total is not None and step > self._first_step:
            seconds = (time.monotonic() - self._started) / (step - self._first_step)
            left = f", {tqdm.format_interval(seconds * (total - step))} left"
        shown = ", ".join(facts(trainer, self._recent))
        rank_zero_info(f"step {step}{f'/{total}' if total else ''}: {shown}{left}")


def facts(trainer: L.Trainer, recent: Sequence[StepTimes]) -> Iterator[str]:
    """Yields texts about the step that has ended, and about the times of `recent` steps, the most
    important first."""
    for name, tag, form in (("reward", "reward/mean", ".3f"), ("lag", "policy/lag_mean", ".1f")):
        value = float(trainer.callback_metrics.get(tag, float("nan")))
        if isfinite(value):
            yield f"{name} {value:{form}}"
    times = StepTimes()
    for one in recent:
        times.add(one)
    yield f"waited {(times.wait + times.sync) / times.step:.0%}"
    yield f"{times.generated_tokens_per_s:,.0f} tok/s"
    yield f"{times.step / len(recent):.1f} s/step"
    yield f"waits: rollouts {times.wait / times.step:.0%}, sync {times.sync / times.step:.0%}"


def total_steps(trainer: L.Trainer) -> int | None:
    """Returns the step at which the run ends; None if that is not known."""
    if trainer.max_steps > 0:
        return trainer.max_steps
    steps = trainer.num_training_batches  # of an epoch
    epochs = trainer.max_epochs or -1
    return epochs * int(steps) if epochs > 0 and isfinite(steps) else None
