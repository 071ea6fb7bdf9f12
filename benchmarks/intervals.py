"""95 % intervals for a few runs of one setting, and for the trend of a long one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from lrl.evaluation import wilson_interval

T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of a two-sided 95 % interval, by degrees of freedom."""
BLOCKS = 10


def half_width(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    return T95[len(values) - 1] * stdev(values) / math.sqrt(len(values))


def accuracy_interval(accuracies: Sequence[float], problems: int) -> tuple[float, float, float]:
    """Returns mean, low and high of the accuracies of several seeds on the same problems.

    The wider of two intervals. By the spread between seeds: t on that many runs, held in [0, 1]. By
    the problems: Wilson's for the mean on `problems` trials, not times the number of seeds, since
    all seeds answer the same ones.
    """
    mean = fmean(accuracies)
    low, high = wilson_interval(mean, problems)
    if len(accuracies) > 1:
        half = half_width(accuracies)
        low = min(low, max(0.0, mean - half))
        high = max(high, min(1.0, mean + half))
    return mean, low, high


def slope(values: Sequence[float]) -> tuple[float, float]:
    """Returns the slope of a series per step and half of its 95 % interval: least squares through
    means of ten blocks.

    Neighbouring steps resemble each other, so they are not so many independent points; blocks much
    longer than that resemblance are. NaN for a series shorter than two steps a block.
    """
    size = len(values) // BLOCKS
    if size < 2:
        return math.nan, math.nan
    means = [fmean(values[size * block : size * (block + 1)]) for block in range(BLOCKS)]
    middle, mean = (BLOCKS - 1) / 2, fmean(means)
    spread = sum((block - middle) ** 2 for block in range(BLOCKS))
    rise = sum((block - middle) * (value - mean) for block, value in enumerate(means)) / spread
    rest = sum((value - mean - rise * (block - middle)) ** 2 for block, value in enumerate(means))
    half = T95[BLOCKS - 2] * math.sqrt(rest / (BLOCKS - 2) / spread)
    return rise / size, half / size
