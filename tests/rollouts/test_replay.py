"""The replay buffer."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.rollouts.replay import Replay
from lrl.types import Group
from tests.rollouts.test_packing import make_group


def group(index: int, version: int, reward: float = 0.0) -> Group:
    found = make_group(index, 2, [3, 3])
    for rollout in found.rollouts:
        rollout.versions, rollout.reward = [version] * 3, reward
    return found


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
        replay.add(step, [group(index + i, max(0, step - lag)) for i, lag in enumerate(fresh)])
        index += len(fresh)


def draws(replay: Replay, step: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for seed in range(400):
        replay.seed = seed
        found.update(group.index for group in replay.draw(step))
    return found


def test_the_newest_share_goes_to_the_step_before() -> None:
    replay = Replay(1, 10, newest_share=0.8, reward_weight=0.0)
    replay.add(0, [group(i, 0) for i in range(9)])
    replay.add(1, [group(9, 1)])
    assert 0.75 < draws(replay, 2)[9] / 400 < 0.89  # 0.8 and a tenth of the rest: 0.82


def test_well_rewarded_groups_are_drawn_more() -> None:
    replay = Replay(1, 10, newest_share=0.0, reward_weight=2.0)
    replay.add(0, [group(0, 0, reward=1.0), group(1, 0, reward=0.0)])
    assert 0.82 < draws(replay, 1)[0] / 400 < 0.94  # e^2 / (e^2 + 1) = 0.88


def test_a_resumed_run_draws_the_same_groups_as_an_unbroken_one() -> None:
    whole, resumed = Replay(2, 10), Replay(2, 10)
    whole.add(0, [group(i, 0, reward=i / 5) for i in range(5)])
    resumed.load_state_dict(whole.state_dict())
    assert resumed.draw(1) == whole.draw(1)
    assert resumed.draw(2) == whole.draw(2)


def test_groups_with_nothing_to_train_are_not_kept() -> None:
    unscored, empty = group(0, 0), group(1, 0)
    for rollout in unscored.rollouts:
        rollout.reward = None
    for rollout in empty.rollouts:
        rollout.token_ids, rollout.logprobs, rollout.versions = [], [], []
    replay = Replay(2, 10)
    replay.add(0, [unscored, empty])
    assert not len(replay) and replay.draw(1) == []


@pytest.mark.parametrize("wrong", [{"groups_per_step": 0}, {"max_lag": 0}, {"newest_share": 1.5}])
def test_a_buffer_that_could_do_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Replay(**{"groups_per_step": 1, "max_lag": 1} | wrong)
