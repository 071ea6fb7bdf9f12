"""Bars for work that the user waits for; without a terminal a line every 15 seconds."""

import sys
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm import tqdm

SECONDS_BETWEEN_LINES = 15.0
TIME_ALONE = "{desc} {elapsed}"
LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed}{postfix}"


def progress_bar(work: str, unit: str = "", total: int | None = None) -> "tqdm[Any]":
    """Returns an open bar, which leaves no trace in a terminal when it is closed. `update(0)` shows
    the time.

    Args:
        work: The work, as in "evaluating held_out".
        unit: What is counted; empty if only time passes.
        total: Their number, if it is known.
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
