"""Group baselines."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.advantages import GroupMean

rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


@settings(deadline=None)
@given(rewards)
def test_advantages_of_a_group_sum_to_zero(values: list[float]) -> None:
    assert abs(GroupMean()(torch.tensor(values)).sum().item()) < 1e-4


@settings(deadline=None)
@given(rewards, st.floats(-10, 10, width=32))
def test_a_reward_given_to_everybody_teaches_nothing(values: list[float], bonus: float) -> None:
    torch.testing.assert_close(
        GroupMean()(torch.tensor(values) + bonus), GroupMean()(torch.tensor(values)), atol=1e-5, rtol=1e-5
    )


def test_the_spread_of_a_group_is_kept() -> None:
    assert GroupMean()(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist() == [0.75, -0.25, -0.25, -0.25]
