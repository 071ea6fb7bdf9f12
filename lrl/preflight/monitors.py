"""Checks that what checkpoints and early stopping monitor is a metric of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lrl.evaluation import ACCURACY, MEAN_REWARD, may_give
from lrl.system.config_errors import fault
from lrl.system.import_by_name import did_you_mean

if TYPE_CHECKING:
    from lrl.callbacks.evaluation import Evaluation

log = logging.getLogger(__name__)

GROWING_METRICS = (*(f"/{name}" for name in (*ACCURACY, *MEAN_REWARD)), "reward/mean")
"""Ends of the metrics of which more is better."""


def check_monitors(trainer: L.Trainer, evaluations: Sequence[Evaluation]) -> None:
    """Checks every ModelCheckpoint and EarlyStopping, long before the first evaluation does it."""
    accuracies = [f"eval/{one.prompts.name}/accuracy" for one in evaluations]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, ModelCheckpoint | EarlyStopping) or callback.monitor is None:
            continue
        name = type(callback).__name__
        metric = callback.monitor
        if metric.startswith("eval/") and not _is_given(metric, evaluations):
            known = " Add lrl.callbacks.Evaluation."
            if accuracies:
                known = did_you_mean(metric, accuracies) or f" There is {', '.join(accuracies)}."
            fault(f"{name}.monitor is {metric!r}, which no evaluation of this run gives.{known}")
        elif metric.endswith(GROWING_METRICS) and callback.mode == "min":
            log.warning(
                "%s.monitor is %r with mode min, which takes the smallest one for the best. Set "
                "its mode to max.",
                *(name, metric),
            )


def _is_given(metric: str, evaluations: Sequence[Evaluation]) -> bool:
    return any(may_give(metric, one.prompts.name, one.sampling.n, one.by) for one in evaluations)
