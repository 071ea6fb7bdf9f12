"""Rewards that decide right or wrong in an evaluation."""

from __future__ import annotations

import pytest

import lrl
from lrl.callbacks import Evaluation
from lrl.rewards import ExactMatch, Format

ROWS = [{"prompt": "1+1=", "answer": "2"}]


@pytest.mark.parametrize("weight", [0.0, 0.9, 2.0])
@pytest.mark.parametrize("own", [False, True])
def test_an_accuracy_does_not_know_the_weight_that_a_reward_has_in_training(
    weight: float, own: bool
) -> None:
    trained = ExactMatch(weight=weight)
    data = lrl.RolloutDataModule(ROWS, rewards=[trained, Format("x")])
    evaluation = Evaluation(ROWS, rewards=[trained] if own else None)
    (judge,) = evaluation.rewards_for_evaluation(data)
    assert isinstance(judge, ExactMatch) and judge.weight == 1.0 and trained.weight == weight


def test_of_several_rewards_the_weighted_sum_counts() -> None:
    data = lrl.RolloutDataModule(ROWS, rewards=[ExactMatch()])
    both = Evaluation(ROWS, rewards=[ExactMatch(weight=0.7), Format("x", weight=0.3)])
    assert [judge.weight for judge in both.rewards_for_evaluation(data)] == [0.7, 0.3]
