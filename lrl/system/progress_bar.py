"""Bars for work that the user waits for: in a terminal; elsewhere a line says what has begun."""

import sys
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm import tqdm


def progress_bar(work: str, unit: str, total: int | None = None) -> "tqdm[Any]":
    """Returns an open bar, which leaves no trace when it is closed.

    Args:
        work: The work, as in "evaluating held_out".
        unit: What is counted.
        total: Their number, if it is known.
    """
    if not sys.stderr.isatty():
        rank_zero_info(f"{work}{'' if total is None else f': {total} {unit}s'}")
    return tqdm(desc=work, unit=unit, total=total, disable=None, leave=False, dynamic_ncols=True)
