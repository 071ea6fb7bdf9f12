"""What Lightning says on the screen and in the metrics that is not so; a newcomer should not have to find that out."""

from __future__ import annotations

import logging
import warnings

import lightning as L

UNTRUE_WARNINGS = (
    r"Total length of `\w+` across ranks is zero",  # no validation loop within fit: evaluations run beside the training
    r"Using ModelCheckpoint with manual optimization",  # the state after the step is the state to resume from
    r"You're resuming from a checkpoint that ended before the epoch ended",  # the ledger is what resumes, exactly
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own use of torch
)
ADVERTISEMENTS = "\N{ELECTRIC LIGHT BULB} Tip:"


def silence() -> None:
    """Filter these messages in this process."""
    for message in UNTRUE_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)


def forget_last_step(trainer: L.Trainer) -> None:
    """Take back what the last step logged: Lightning sends it to the loggers again in a step that does not log it.

    A lag that a step does not have would go on with the numbers of the step that had it.
    """
    for metric in (trainer._results or {}).values():
        if not metric.meta.on_epoch:
            metric.reset()


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(ADVERTISEMENTS)
