"""The intervals that the benchmarks report."""

import pytest
import torch

from benchmarks.intervals import accuracy_interval, slope
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


def test_a_slope_is_found_within_its_interval_also_when_neighbouring_steps_resemble_each_other() -> (
    None
):
    torch.manual_seed(0)
    covered = 0
    for _ in range(100):
        noise = torch.randn(501)
        values = [0.01 * step + float(noise[step] + noise[step + 1]) for step in range(500)]
        rise, half = slope(values)
        covered += abs(rise - 0.01) <= half
    assert covered >= 88


def test_a_series_too_short_has_no_slope() -> None:
    rise, half = slope([1.0] * 19)
    assert rise != rise and half != half
