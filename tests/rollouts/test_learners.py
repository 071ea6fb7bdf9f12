"""What a run has learnt, through checkpoints of the same and of other settings."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from lrl.advantages import Advantages, GroupMean, ReinforcePlusPlus
from lrl.rewards import ExactMatch
from lrl.rollouts.learners import Learners, settings_of
from lrl.rollouts.replay import Replay
from lrl.routing.length_predictor import LengthPredictor
from lrl.types import Group, Prompt, Sampling
from tests.checkpoints.through_files import through_a_file
from tests.rollouts.test_packing import make_group

SAMPLING = Sampling(n=2, max_tokens=9)
SETTINGS: dict[str, Any] = {
    "sampling": SAMPLING,
    "rewards": settings_of([ExactMatch()]),
    "environment": {},
    "kl_in_the_reward": (),
}


def groups() -> list[Group]:
    found = [make_group(index, 2, [3, 5]) for index in range(4)]
    for group in found:
        for place, rollout in enumerate(group.rollouts):
            rollout.reward = float(place)
    return found


GROUPS = groups()


def prompt_at(index: int) -> Prompt:
    return GROUPS[index].prompt


def learners(advantages: Advantages | None = None) -> Learners:
    return Learners(advantages or ReinforcePlusPlus(), Replay(2, 8), LengthPredictor())


def taught() -> Learners:
    found = learners()
    found.end_step(0, GROUPS)
    return found


def saved() -> dict[str, Any]:
    """A checkpoint of the parts that have learnt."""
    found = taught()
    return through_a_file(found.state_dict(found.made_with(**SETTINGS)))


def known(found: Learners) -> set[str]:
    """Returns the names of the parts that know what another run has learnt."""
    ready = {
        "advantages": bool(found.advantages.state_dict().get("mean_and_variance")),
        "replay": bool(found.replay),
        "length_predictor": found.length_predictor.quantile(1.0) > 1,  # type: ignore[union-attr]
    }
    return {name for name, knows in ready.items() if knows}


ALL = {"advantages", "replay", "length_predictor"}
CASES: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "the same settings": ({}, ALL, ""),
    "another temperature": (
        {"sampling": replace(SAMPLING, temperature=0.5)},
        {"advantages"},
        "data.temperature was 1 and is 0.5",
    ),
    "larger groups": (
        {"sampling": replace(SAMPLING, n=3)},
        {"advantages", "length_predictor"},
        "data.rollouts_per_group was 2 and is 3",
    ),
    "another reward": (
        {"rewards": settings_of([ExactMatch(weight=0.5)])},
        {"length_predictor"},
        "data.rewards exact_match has changed",
    ),
    "a KL penalty in the reward": (
        {"kl_in_the_reward": (0.1, "k1", None)},
        {"replay", "length_predictor"},
        "model.reference has changed",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_learnt_is_restored_only_under_the_settings_on_which_it_depends(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed, expected, message = CASES[case]
    state, resumed = saved(), learners()
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state, resumed.made_with(**SETTINGS | changed), prompt_at)
    assert known(resumed) == expected
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(ALL - expected) and all(message in line for line in told)
    assert all(any(f"data.{name} begins anew" in line for line in told) for name in ALL - expected)


def test_moments_of_another_class_of_advantages_are_not_restored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Own(ReinforcePlusPlus):
        """A user's baseline."""

    state = saved()
    for other in (Own(), GroupMean()):
        resumed = learners(other)
        resumed.load_state_dict(state, resumed.made_with(**SETTINGS), prompt_at)
        assert known(resumed) == {"replay", "length_predictor"}
        assert "data.advantages begins anew" in caplog.text


def test_a_part_that_the_checkpoint_has_not_begins_anew_and_others_are_restored() -> None:
    state = saved()
    del state["replay"]
    resumed = learners()
    resumed.load_state_dict(state, resumed.made_with(**SETTINGS), prompt_at)
    assert known(resumed) == {"advantages", "length_predictor"}
    without_prompts = learners()
    without_prompts.load_state_dict(saved(), resumed.made_with(**SETTINGS), None)
    assert known(without_prompts) == {"advantages", "length_predictor"}


def test_a_second_fit_of_one_process_begins_with_nothing_of_the_first() -> None:
    found = learners()
    found.begin_anew()
    found.end_step(0, GROUPS)
    assert known(found) == ALL
    found.begin_anew()
    assert known(found) == set()
    rewards = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(found.advantages(rewards), ReinforcePlusPlus()(rewards))
