"""The intervals that the benchmarks report."""

import pytest

from benchmarks.intervals import accuracy_interval
from lrl.evaluation import wilson_interval


def test_an_interval_is_as_wide_as_the_seeds_spread_and_never_narrower_than_the_problems_allow() -> (
    None
):
    assert accuracy_interval([0.9], 500) == (0.9, *wilson_interval(0.9, 500))
    assert accuracy_interval([0.9, 0.9, 0.9], 500) == pytest.approx(
        (0.9, *wilson_interval(0.9, 500))
    )
    mean, low, high = accuracy_interval([0.4, 0.5, 0.6], 500)
    assert (mean, low, high) == pytest.approx(
        (0.5, 0.5 - 4.303 * 0.1 / 3**0.5, 0.5 + 4.303 * 0.1 / 3**0.5)
    )
    assert accuracy_interval([0.1, 0.9], 500)[1:] == (0.0, 1.0)
