"""Faults that only a script can have: an object of another kind where the command line makes the
right one.

Covers lrl/policy.py, datamodule.py.
"""

from __future__ import annotations

from typing import Any

import pytest

import lrl


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"objective": "PPO"}, "model.objective is 'PPO'; give an object of the class Objective."),
        ({"objective": lrl.objectives.PPO}, "give PPO()."),
        ({"lora": 8}, "model.lora is 8; give an object of the class LoRA."),
        ({"reference": True}, "model.reference is True; give an object of the class Reference."),
        ({"advantages": lrl.advantages.GRPO}, "give GRPO()."),
        ({"replay": 4}, "data.replay is 4; give an object of the class Replay."),
        ({"dispatch": "LeastTokens"}, "give an object of the class DispatchPolicy."),
    ],
)
def test_a_setting_of_another_kind_is_named(
    settings: dict[str, Any], text: str, quickstart_policy: object
) -> None:
    of_data = settings.keys() & {"advantages", "replay", "dispatch"}
    with pytest.raises(lrl.ConfigError) as caught:
        if of_data:
            rows = [{"prompt": "1+1=", "answer": "2"}]
            lrl.RolloutDataModule(rows, [lrl.rewards.ExactMatch()], **settings)
        else:
            lrl.PolicyModule(str(quickstart_policy), **settings)
    assert text in str(caught.value)
