"""What Lightning says on the screen that is not so here; a newcomer should not have to find that out."""

from __future__ import annotations

import logging
import warnings

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


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(ADVERTISEMENTS)
