"""What a run writes for its user beside the checkpoints: bars, logs without warnings that are untrue
for lrl, and files and loggers that may fail. A full disk costs a warning, not the run.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from tqdm import tqdm

log = logging.getLogger(__name__)

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

_warned: WeakSet[Any] = WeakSet()


def silence() -> None:
    """Filters these messages in this process, and transformers' bars where there is no terminal:
    each of their steps would be a line."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar  # here: a worker has none

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
        from lightning.pytorch.utilities.rank_zero import rank_zero_info

        if line := text.strip():
            rank_zero_info(line)

    def flush(self) -> None:
        """Does nothing: a line is out at once."""


def os_error(error: BaseException | None) -> OSError | None:
    """Returns `error` or the OSError that caused it: torch and TensorBoardLogger raise other errors
    from one."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def best_effort(subject: str, path: Path | str) -> Iterator[None]:
    """Logs an OSError of a block that writes `subject` to `path`."""
    try:
        yield
    except OSError as error:
        log.warning("%s cannot be written to %s: %s. The run continues.", subject, path, error)


@contextmanager
def may_not_log(logger: Any) -> Iterator[None]:
    """Suppresses the OSErrors of a Lightning logger in the block; logs only the first of each
    logger."""
    try:
        yield
    except Exception as error:
        if (reason := os_error(error)) is None:
            raise
        if logger not in _warned:
            _warned.add(logger)
            folder = getattr(logger, "log_dir", None) or logger.save_dir
            text = "%s cannot write to %s: %s. The run continues, with gaps in its log."
            log.warning(text, type(logger).__name__, folder, reason)


def writable(text: str) -> str:
    """Returns a text that UTF-8 can encode: half of a surrogate pair, as JSON and the messages of
    errors may have, becomes its escape, such as `\\ud83d`."""
    return text.encode(errors="backslashreplace").decode()
