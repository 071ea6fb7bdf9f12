"""What a user sees of a run: bars for work that takes long, and none of Lightning's warnings that are
untrue for lrl."""

import logging
import sys
import warnings
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

UNTRUE_WARNINGS = (
    # No validation loop within fit: evaluations run during the training.
    r"Total length of `\w+` across ranks is zero",
    # The state after the step is the state to resume from.
    r"Using ModelCheckpoint with manual optimization",
    # The ledger resumes exactly.
    r"You're resuming from a checkpoint that ended before the epoch ended",
    # Its rows stay.
    r"Experiment logs directory .* exists and is not empty",
    # Lightning's own use of torch.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)
ADVERTISEMENTS = "\N{ELECTRIC LIGHT BULB} Tip:"
SECONDS_BETWEEN_LINES = 15.0
TIME_ALONE = "{desc} {elapsed}"
LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed}{postfix}"


def silence() -> None:
    """Filters these messages in this process, and transformers' bars where there is no terminal:
    each of their steps would be a line."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    for message in UNTRUE_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(lambda record: not record.getMessage().startswith(ADVERTISEMENTS))


def progress_bar(work: str, unit: str = "", total: int | None = None) -> "tqdm[Any]":
    """Returns an open bar for work such as "evaluating held_out", which leaves no trace in a
    terminal when it is closed; without a terminal it is a line every 15 seconds.

    Without a `unit`, nothing is counted: `update(0)` shows the time.
    """
    look: dict[str, Any] = {"desc": work, "unit": f" {unit}", "total": total, "leave": False}
    if sys.stderr.isatty():
        return tqdm(**look, dynamic_ncols=True, bar_format=None if unit else TIME_ALONE)
    lines: Any = _Lines()
    often = {"mininterval": SECONDS_BETWEEN_LINES, "miniters": 0}
    return tqdm(**look, **often, file=lines, bar_format=LINE if total else TIME_ALONE)


class _Lines:
    """A file that passes on what tqdm draws, line by line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            rank_zero_info(line)

    def flush(self) -> None:
        """Does nothing: a line is out at once."""
