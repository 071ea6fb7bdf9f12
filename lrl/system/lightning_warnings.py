"""Silenced warnings and stale metrics of Lightning that are untrue for lrl and would mislead a
user."""

import logging
import sys
import warnings

import lightning as L
from transformers.utils.logging import disable_progress_bar

UNTRUE_WARNINGS = (
    r"Total length of `\w+` across ranks is zero",  # no validation loop within fit: evaluations run during the training
    r"Using ModelCheckpoint with manual optimization",  # the state after the step is the state to resume from
    r"You're resuming from a checkpoint that ended before the epoch ended",  # the ledger resumes exactly
    r"Experiment logs directory .* exists and is not empty",  # its rows stay
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own use of torch
)
ADVERTISEMENTS = "\N{ELECTRIC LIGHT BULB} Tip:"


def silence() -> None:
    """Filters these messages in this process, and transformers' bars where there is no terminal:
    each of their steps would be a line."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    for message in UNTRUE_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: not record.getMessage().startswith(ADVERTISEMENTS))


def forget_last_step(trainer: L.Trainer) -> None:
    """Resets the metrics that the last step logged: Lightning logs them again in a step without
    them."""
    for metric in (trainer._results or {}).values():
        if not metric.meta.on_epoch:
            metric.reset()
