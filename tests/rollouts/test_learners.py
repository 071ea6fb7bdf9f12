"""What a run has learnt, through checkpoints of the same and of other settings; the replay buffer."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.advantages import Advantages, ReinforcePlusPlus
from lrl.rewards import ExactMatch
from lrl.rollouts.learners import Learners, Replay, settings_of
from lrl.routing.length_predictor import LengthPredictor
from lrl.types import Group, Sampling
from tests import made
from tests.checkpoints.through_files import through_a_file

SAMPLING = Sampling(n=2, max_tokens=9)
SETTINGS: dict[str, Any] = {
    "sampling": SAMPLING,
    "rewards": settings_of([ExactMatch()]),
    "environment": {},
    "kl_in_the_reward": (),
}


GROUPS = [made.group(index, made.rollout(3, 0.0), made.rollout(5, 1.0)) for index in range(4)]


def replay_of(groups: list[Group], *settings: int) -> Replay:
    found = Replay(*settings)
    found.prompts = [group.prompt for group in groups]
    return found


def learners(advantages: Advantages | None = None) -> Learners:
    replay = replay_of(GROUPS, 2, 8)
    return Learners(advantages or ReinforcePlusPlus(), replay, LengthPredictor())


def saved() -> dict[str, Any]:
    found = learners()
    found.end_step(0, GROUPS)
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
        resumed.load_state_dict(state, resumed.made_with(**SETTINGS | changed))
    assert known(resumed) == expected
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(ALL - expected) and all(message in line for line in told)
    assert all(any(f"data.{name} begins anew" in line for line in told) for name in ALL - expected)


def test_moments_of_another_class_of_advantages_are_not_restored() -> None:
    class Own(ReinforcePlusPlus):
        """A user's baseline."""

    resumed = learners(Own())
    resumed.load_state_dict(saved(), resumed.made_with(**SETTINGS))
    assert known(resumed) == {"replay", "length_predictor"}


@pytest.mark.parametrize("resumed", [False, True])
def test_a_second_fit_of_one_process_begins_with_nothing_of_the_first(resumed: bool) -> None:
    found = learners()
    found.begin_anew()
    if resumed:
        found.load_state_dict(saved(), found.made_with(**SETTINGS))
    found.end_step(0, GROUPS)
    assert known(found) == ALL
    found.begin_anew()
    assert known(found) == set()
    rewards = torch.tensor([0.0, 1.0])
    torch.testing.assert_close(found.advantages(rewards), ReinforcePlusPlus()(rewards))


def of_version(index: int, version: int, reward: float = 0.0) -> Group:
    return made.group(index, *(made.rollout(3, reward, version) for _ in range(2)))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 5),
    st.integers(1, 6),
    st.floats(0, 1),
    st.floats(0, 5),
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=12),
)
def test_nothing_older_than_the_bound_is_drawn_and_nothing_twice_in_a_step(
    count: int, max_lag: int, share: float, weight: float, lags: list[list[int]]
) -> None:
    replay, index = Replay(count, max_lag, share, weight), 0
    for step, fresh in enumerate(lags):
        drawn = replay.draw(step)
        assert len({group.index for group in drawn}) == len(drawn) <= count
        assert all(step - group.oldest_version <= max_lag for group in drawn)
        assert len(drawn) == min(count, len(replay)), "what is there and young enough is used"
        replay.add(step, [of_version(index + i, max(0, step - lag)) for i, lag in enumerate(fresh)])
        index += len(fresh)


def draws(replay: Replay, step: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for seed in range(400):
        replay.seed = seed
        found.update(group.index for group in replay.draw(step))
    return found


def test_the_newest_and_the_well_rewarded_groups_are_drawn_more() -> None:
    replay = Replay(1, 10, newest_share=0.8, reward_weight=0.0)
    replay.add(0, [of_version(i, 0) for i in range(9)])
    replay.add(1, [of_version(9, 1)])
    assert 0.75 < draws(replay, 2)[9] / 400 < 0.89  # 0.8 and a tenth of the rest: 0.82
    replay = Replay(1, 10, newest_share=0.0, reward_weight=2.0)
    replay.add(0, [of_version(0, 0, reward=1.0), of_version(1, 0, reward=0.0)])
    assert 0.82 < draws(replay, 1)[0] / 400 < 0.94  # e^2 / (e^2 + 1) = 0.88


def test_a_resumed_run_draws_the_same_groups_as_an_unbroken_one() -> None:
    groups = [of_version(i, 0, reward=i / 5) for i in range(5)]
    whole, resumed = replay_of(groups, 2, 10), replay_of(groups, 2, 10)
    whole.add(0, groups[:3])
    whole.add(1, groups[3:])
    resumed.load_state_dict(through_a_file(whole.state_dict()))
    for step in (2, 3, 4):
        assert resumed.draw(step) == whole.draw(step)


def test_a_group_whose_row_has_another_answer_is_not_replayed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups = [of_version(0, 0), of_version(1, 0)]
    replay, resumed = replay_of(groups, 2, 10), replay_of(groups, 2, 10)
    for one in groups:
        one.prompt.columns = {"answer": "5"}
    replay.add(0, groups)
    state = through_a_file(replay.state_dict())
    groups[1].prompt.columns = {"answer": "6"}
    resumed.load_state_dict(state)
    assert [one.index for one in resumed.draw(1)] == [0]
    told = "1 groups are not replayed any longer: the columns of their rows have changed"
    assert told in caplog.text


def test_groups_with_nothing_to_train_are_not_kept() -> None:
    unscored, empty = made.group(0, made.rollout(), made.rollout()), made.group(1)
    empty.rollouts = [made.rollout(0, 1.0), made.rollout(0, 0.0)]
    replay = Replay(2, 10)
    replay.add(0, [unscored, empty])
    assert not len(replay) and replay.draw(1) == []
