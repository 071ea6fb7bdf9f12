"""The figures of a step's answers for every lag apart."""

from __future__ import annotations

import pytest

from lrl.callbacks.rollout_log import resumed_scalars, scalars_by_lag
from lrl.data import Rollout
from lrl.objectives.diagnostics import MAX_LAG_SHOWN
from lrl.rollouts.saved import Resumed


def answer(versions: list[int], reward: float | None = 1.0) -> Rollout:
    tokens = len(versions)
    return Rollout(
        token_ids=[5] * tokens,
        logprobs=[-1.0] * tokens,
        versions=versions,
        finish_reason="stop",
        text="",
        reward=reward,
    )


def test_an_answer_has_the_lag_of_its_oldest_token() -> None:
    found = scalars_by_lag([answer([7, 8, 9], 1.0), answer([9], 0.0), answer([7], 0.5), answer([9, 9, 9], 1.0)], step=9)
    assert found == {
        "rollouts/by_lag/2/share": 0.5,
        "rollouts/by_lag/2/length": 2.0,
        "rollouts/by_lag/2/reward": 0.75,
        "rollouts/by_lag/0/share": 0.5,
        "rollouts/by_lag/0/length": 2.0,
        "rollouts/by_lag/0/reward": 0.5,
    }


def test_large_lags_are_pooled() -> None:
    rollouts = [answer([100 - lag]) for lag in (1, MAX_LAG_SHOWN - 1, MAX_LAG_SHOWN, MAX_LAG_SHOWN + 1, 90)]
    found = scalars_by_lag(rollouts, step=100)
    assert {tag: value for tag, value in found.items() if tag.endswith("share")} == {
        "rollouts/by_lag/1/share": pytest.approx(0.2),
        f"rollouts/by_lag/{MAX_LAG_SHOWN - 1}/share": pytest.approx(0.2),
        f"rollouts/by_lag/{MAX_LAG_SHOWN}/share": pytest.approx(0.6),
    }


def test_an_answer_without_a_reward_or_a_token_is_no_zero() -> None:
    found = scalars_by_lag([answer([4], None), answer([5], None), answer([5], 1.0), answer([])], step=5)
    assert "rollouts/by_lag/1/reward" not in found
    assert found["rollouts/by_lag/1/share"] == 0.25
    assert found["rollouts/by_lag/0/reward"] == 1.0


def test_what_was_resumed_is_told_at_the_first_step_alone() -> None:
    resumed = Resumed(step=9, answers=37, tokens=4210, finished_groups=5)
    assert resumed_scalars(resumed, 9) == {"rollouts/resumed_answers": 37.0, "rollouts/resumed_tokens": 4210.0}
    assert resumed_scalars(resumed, 10) == resumed_scalars(None, 0) == {}
