"""95 % intervals for a few runs of one setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from lrl.evaluation import wilson_interval

T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t of a two-sided 95 % interval, by degrees of freedom."""


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
