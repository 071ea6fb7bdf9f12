"""Goals, lags and cells in the tables of the sweep over lags."""

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import lag_sweep


def row(
    objective: str = "AIPO", lag: int = 0, seed: int = 0, accuracies: Sequence[float] = (0.4, 0.9)
) -> Any:
    series = {name: [0.5, None, 1.0] for name in lag_sweep.SERIES} | {"tokens": [100, 0, 300]}
    evaluations = [
        {"step": 10 * n, "accuracy": value, "problems": 500} for n, value in enumerate(accuracies)
    ]
    found = {
        "objective": objective,
        "max_lag": lag,
        "seed": seed,
        "groups": 8,
        "responses": 16,
        "diverged_at": None,
    }
    return found | {"series": series, "evaluations": evaluations}


# ---- tables


def test_the_goal_is_reached_at_the_first_evaluation_that_finds_it() -> None:
    assert lag_sweep.steps_to(row(accuracies=[0.4, 0.79, 0.8, 0.5, 0.9])) == 20
    assert lag_sweep.steps_to(row(accuracies=[0.4, 0.79])) is None


def test_seeds_that_did_not_reach_the_goal_are_counted_and_not_averaged() -> None:
    cell = [
        row(accuracies=[0.4, 0.9]),
        row(accuracies=[0.4, 0.5, 0.6, 0.9]),
        row(accuracies=[0.4, 0.5]),
    ]
    assert lag_sweep.goal_cell(cell) == "20 (2,560), 2 of 3"
    assert lag_sweep.goal_cell(cell[2:]) == "0 of 1"


def test_lag_is_a_mean_over_tokens_and_steps_without_tokens_have_none() -> None:
    assert lag_sweep.seen_lag(row()) == pytest.approx((100 * 0.5 + 300 * 1.0) / 400)


def test_every_cell_of_the_table_is_computed_from_its_own_runs() -> None:
    rows = [
        row("AIPO", 0),
        row("AIPO", 8, accuracies=[0.4, 0.7]),
        row("PPO", 8, accuracies=[0.4, 0.1]),
    ]
    head, _, aipo, ppo = lag_sweep.table(
        rows, lambda cell: f"{lag_sweep.final(cell[0])}"
    ).splitlines()
    assert head == "| objective | max_lag 0 | max_lag 8 |"
    assert (aipo, ppo) == ("| AIPO | 0.9 | 0.7 |", "| PPO |  | 0.1 |")
