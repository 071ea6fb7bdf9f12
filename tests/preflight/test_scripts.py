"""Faults that only a script can have: an object of another kind where the command line makes the
right one.

Covers lrl/policy.py, datamodule.py.
"""

from __future__ import annotations

from typing import Any

import pytest

import lrl
from lrl.rewards.function import as_reward

ROWS = [{"prompt": "1+1=", "answer": "2"}]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"objective": "PPO"}, "model.objective is 'PPO'; give an object of the class Objective."),
        ({"objective": lrl.objectives.PPO}, "give PPO()."),
        ({"lora": 8}, "model.lora is 8; give an object of the class LoRA."),
        ({"reference": True}, "model.reference is True; give an object of the class Reference."),
        ({"lr": "1e-5"}, "model.lr is '1e-5'; it must be a number, at least 0."),
        ({"max_grad_norm": "1"}, "model.max_grad_norm is '1'; it must be a number, above 0."),
    ],
)
def test_a_policys_setting_of_another_kind_is_named(
    settings: dict[str, Any], text: str, quickstart_policy: object
) -> None:
    with pytest.raises(lrl.ConfigError) as caught:
        lrl.PolicyModule(str(quickstart_policy), **settings)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"advantages": lrl.advantages.GRPO},
            "data.advantages is <class 'lrl.advantages.GRPO'>; give GRPO().",
        ),
        ({"replay": 4}, "data.replay is 4; give an object of the class Replay."),
        (
            {"dispatch": "LeastTokens"},
            "data.dispatch is 'LeastTokens'; give an object of the class DispatchPolicy.",
        ),
        ({"max_lag": "1"}, "data.max_lag is '1'; it must be a number, at least 0."),
    ],
)
def test_a_data_modules_setting_of_another_kind_is_named(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(lrl.ConfigError) as caught:
        lrl.RolloutDataModule(ROWS, [lrl.rewards.ExactMatch()], **settings)
    assert text in str(caught.value)


def test_the_class_of_a_reward_is_no_reward() -> None:
    with pytest.raises(
        lrl.ConfigError, match=r"data.rewards has the class ExactMatch: write ExactMatch\(\)"
    ):
        as_reward(lrl.rewards.ExactMatch)
