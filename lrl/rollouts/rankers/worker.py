"""What runs in a ranker's process, which has one job at a time: learn, or guess."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import cache

import torch
import transformers

from lrl.owner import die_with
from lrl.rollouts.rankers.finetuning import FineTuned, Recipe, Row

fine_tuned = cache(FineTuned)
"""The model of this process, opened by its first job: what is wrong with it is then that job's error."""


def begin(owner: int, on_cpu: bool) -> None:
    """Set a new process up. On a CPU it has what trainer and generators leave."""
    die_with(owner)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    transformers.logging.set_verbosity_error()  # it would warn of the new head at its end
    transformers.logging.disable_progress_bar()
    if on_cpu:
        os.nice(19)
        torch.set_num_threads(1)


def learn(recipe: Recipe, rows: Sequence[Row]) -> None:
    """See `FineTuned.learn`."""
    fine_tuned(recipe).learn(rows)


def guess(recipe: Recipe, texts: Sequence[str]) -> list[float]:
    """See `FineTuned.guess`."""
    return fine_tuned(recipe).guess(texts)
