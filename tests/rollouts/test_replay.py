"""The replay buffer."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.rollouts.replay import Replay
from lrl.types import Group
from tests.checkpoints.through_files import through_a_file
from tests.rollouts.test_packing import make_group


def group(index: int, version: int, reward: float = 0.0) -> Group:
    found = make_group(index, 2, [3, 3])
    for rollout in found.rollouts:
        rollout.versions = [version] * 3
        rollout.reward = reward
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


def test_the_newest_and_the_well_rewarded_groups_are_drawn_more() -> None:
    replay = Replay(1, 10, newest_share=0.8, reward_weight=0.0)
    replay.add(0, [group(i, 0) for i in range(9)])
    replay.add(1, [group(9, 1)])
    assert 0.75 < draws(replay, 2)[9] / 400 < 0.89  # 0.8 and a tenth of the rest: 0.82
    replay = Replay(1, 10, newest_share=0.0, reward_weight=2.0)
    replay.add(0, [group(0, 0, reward=1.0), group(1, 0, reward=0.0)])
    assert 0.82 < draws(replay, 1)[0] / 400 < 0.94  # e^2 / (e^2 + 1) = 0.88


def test_a_resumed_run_draws_the_same_groups_as_an_unbroken_one() -> None:
    whole, resumed = Replay(2, 10), Replay(2, 10)
    groups = [group(i, 0, reward=i / 5) for i in range(5)]
    whole.add(0, groups)
    resumed.load_state_dict(through_a_file(whole.state_dict()), lambda index: groups[index].prompt)
    for step in (1, 2):
        ours, theirs = resumed.draw(step), whole.draw(step)
        assert [group.prompt for group in ours] == [group.prompt for group in theirs]
        assert [group.rewards for group in ours] == [group.rewards for group in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert [r.token_ids for r in one.rollouts] == [r.token_ids for r in other.rollouts]
            assert [r.versions for r in one.rollouts] == [r.versions for r in other.rollouts]


def test_a_group_whose_row_has_another_answer_is_not_replayed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replay, resumed, groups = Replay(2, 10), Replay(2, 10), [group(0, 0), group(1, 0)]
    for one in groups:
        one.prompt.columns = {"answer": "5"}
    replay.add(0, groups)
    state = through_a_file(replay.state_dict())
    groups[1].prompt.columns = {"answer": "6"}
    resumed.load_state_dict(state, lambda index: groups[index].prompt)
    assert [one.index for one in resumed.draw(1)] == [0]
    told = "1 groups are not replayed any longer: the columns of their rows have changed"
    assert told in caplog.text


def test_groups_with_nothing_to_train_are_not_kept() -> None:
    unscored, empty = group(0, 0), group(1, 0)
    for rollout in unscored.rollouts:
        rollout.reward = None
    for rollout in empty.rollouts:
        rollout.token_ids = []
        rollout.logprobs = []
        rollout.versions = []
    replay = Replay(2, 10)
    replay.add(0, [unscored, empty])
    assert not len(replay) and replay.draw(1) == []


@pytest.mark.parametrize("wrong", [{"groups_per_step": 0}, {"max_lag": 0}, {"newest_share": 1.5}])
def test_a_buffer_that_could_do_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Replay(**{"groups_per_step": 1, "max_lag": 1} | wrong)
