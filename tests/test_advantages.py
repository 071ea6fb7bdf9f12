"""Group baselines."""

from typing import Any

import numpy as np
import pytest
import torch

from lrl.advantages import (
    GAE,
    GRPO,
    RLOO,
    Advantages,
    ArCHer,
    Baseline,
    DrGRPO,
    GroupMean,
    ReinforcePlusPlus,
    RewardToGo,
    of_tokens,
    rewards_by_action,
    rewards_of,
)
from lrl.types import ENVIRONMENT, Rollout, TurnValues
from tests import made

RELATIVE = [GroupMean(), DrGRPO(), GRPO(), RLOO(), ReinforcePlusPlus()]
OF_GROUPS = [*RELATIVE, RewardToGo()]


class Half(Baseline):
    """Reward less one half, so a response needs no other."""

    min_rollouts = 1

    def __call__(self, rewards: torch.Tensor) -> torch.Tensor:
        return rewards - 0.5


class Remembering(GroupMean):
    """A user's baseline that learns from whole steps."""

    def end_step(self, rewards: torch.Tensor) -> None:
        self.seen = rewards


def rollout(reward: float | None, tokens: int = 2, **more: Any) -> Rollout:
    return made.rollout(tokens, reward, **more)


@pytest.mark.parametrize("baseline", OF_GROUPS, ids=lambda baseline: type(baseline).__name__)
@pytest.mark.parametrize("reward", [0.1, 27.3, -1 / 3, 1000.1, 1e15 / 7, 1e-300])
@pytest.mark.parametrize("n", [2, 3, 7, 64])
def test_equal_rewards_are_no_advantage(baseline: Advantages, reward: float, n: int) -> None:
    for advantages in baseline.of([rollout(reward)] * n):
        assert not advantages.any()


def test_rewards_that_never_differ_are_no_advantage_over_the_steps_before() -> None:
    baseline = ReinforcePlusPlus()
    for _ in range(5):
        baseline.end_step(rewards_of([rollout(1000.1)] * 3))
    assert [one.item() for one in baseline.of([rollout(1000.1)])] == [0.0]


@pytest.mark.parametrize(
    "values",
    [
        [1e8, 1e8 + 1, 1e8 + 2, 1e8 + 5],  # float32 takes the first three for one number
        [1e15, 1e15 + 1, -1e15],
        [27.3, 27.3, 27.3 + 1e-6],
        [1e-30, 3e-30, 0.0],
        [0.1] * 5 + [0.3],
    ],
)
def test_advantages_are_those_of_the_formula_in_float64(values: list[float]) -> None:
    exact = np.array(values, dtype=np.float64)
    n, from_mean = len(exact), exact - exact[0] - (exact - exact[0]).mean()
    of_others = np.array([exact[i] - np.delete(exact, i).mean() for i in range(n)])
    warm = ReinforcePlusPlus(decay=0.0)
    warm.end_step(rewards_of(map(rollout, values)))
    formulas = {
        GroupMean(): from_mean,
        RewardToGo(): from_mean,
        GRPO(): from_mean / (from_mean.std(ddof=1) + 1e-4),
        RLOO(): of_others,
        ReinforcePlusPlus(): from_mean / (from_mean.std() + 1e-4),
        warm: from_mean / (from_mean.std() + 1e-4),
    }
    for baseline, expected in formulas.items():
        found = [one.flatten()[0].item() for one in baseline.of(list(map(rollout, values)))]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7 * np.abs(expected).max())


def test_reinforce_plus_plus_uses_the_moments_of_the_steps_before() -> None:
    baseline = ReinforcePlusPlus(decay=0.5, epsilon=1e-9)
    baseline.end_step(torch.tensor([0.0, 2.0]))  # mean 1, mean of squares 2
    assert baseline(torch.tensor([3.0, 3.0])).tolist() == pytest.approx([2.0, 2.0])
    baseline.end_step(torch.tensor([3.0]))  # mean 2, mean of squares 5.5
    assert baseline(torch.tensor([3.0])).tolist() == pytest.approx([1 / 1.5**0.5])


def test_the_moments_live_through_a_checkpoint() -> None:
    before, after = ReinforcePlusPlus(), ReinforcePlusPlus()
    before.end_step(torch.tensor([0.0, 1.0, 5.0]))
    after.load_state_dict(before.state_dict())
    assert torch.equal(before(torch.tensor([2.0])), after(torch.tensor([2.0])))


def test_the_kl_penalty_is_subtracted_before_the_baseline() -> None:
    for advantages in (GroupMean(), RewardToGo(0.5)):
        found = advantages.of([rollout(1.0, kl_penalty=0.5), rollout(1.0)])
        assert [advantage.flatten()[0].item() for advantage in found] == [-0.25, 0.25]


def test_a_tokens_advantage_is_what_comes_after_its_value() -> None:
    one = rollout(1.0, tokens=4, kl_penalty=0.5)
    one.values = [0.1, 9.0, 0.3, 0.2]
    one.versions[1] = ENVIRONMENT
    errors = [0.3 - 0.1, 0.2 - 0.3, 0.5 - 0.2]
    (reward_less_value,), (one_step,), (between,) = (GAE(lam).of([one]) for lam in (1.0, 0.0, 0.5))
    assert reward_less_value.tolist() == pytest.approx([0.4, 0.0, 0.2, 0.3])
    assert one_step.tolist() == pytest.approx([errors[0], 0.0, *errors[1:]])
    first = errors[0] + 0.5 * errors[1] + 0.25 * errors[2]
    assert between.tolist() == pytest.approx([first, 0.0, errors[1] + 0.5 * errors[2], errors[2]])


def test_all_tokens_of_a_turn_have_the_advantage_of_its_start() -> None:
    one = rollout(1.0, tokens=5)
    one.values = [0.1, 9.0, 9.0, 0.3, 9.0]
    one.versions[2] = ENVIRONMENT
    one.turn_ends = [2, 5]
    (found,) = GAE(0.5, over="turn").of([one])
    first = (0.3 - 0.1) + 0.5 * (1 - 0.3)
    assert found.tolist() == pytest.approx([first, first, 0.0, 0.7, 0.7])


@pytest.mark.parametrize("over", ["token", "turn"])
def test_the_reward_of_a_turn_comes_at_its_end(over: Any) -> None:
    one = rollout(1.0, tokens=5)
    one.values = [0.0] * 5
    one.versions[2] = ENVIRONMENT
    one.turn_ends = [2, 5]
    one.turn_rewards = [0.75, 0.5]  # another reward is -0.25, so the whole is not their sum
    (found,) = GAE(over=over).of([one])
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.0, 0.25, 0.25])


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0, -2.0, 0.1])
def test_the_weight_of_the_environments_rewards_is_that_of_each_turn(weight: float) -> None:
    one = episode(1.0, 0.0, 0.25)
    one.reward = weight * 1.25 + 3.0  # with a reward of 3 for the whole episode
    one.turn_weight = weight
    expected = [weight, 0.0, weight * 0.25 + 3.0]
    assert rewards_by_action(one, one.turns) == pytest.approx(expected)
    of_last_tokens = [0.0, weight, 0.0, 0.0, 0.0, weight * 0.25 + 3.0]
    assert rewards_by_action(one, of_tokens(one)) == pytest.approx(of_last_tokens)


@pytest.mark.parametrize(
    ("advantages", "rewards", "nothing"),
    [
        (GroupMean(), [0.5, 0.5], True),
        (GroupMean(), [0.0, 0.5], False),
        (GroupMean(), [0.1, None, 0.1, 0.1], True),
        (GroupMean(), [0.5, None], False),
        (Half(), [0.5, None], True),
        (Half(), [1.0, 1.0], False),
        (Half(), [None, None], False),
    ],
)
def test_a_group_teaches_nothing_if_each_advantage_is_zero(
    advantages: Advantages, rewards: list[float | None], nothing: bool
) -> None:
    assert advantages.teaches_nothing(list(map(rollout, rewards))) == nothing


def test_episodes_of_equal_rewards_teach_where_their_turns_differ() -> None:
    early, late = episode(1.0, 0.0), episode(0.0, 1.0)
    assert GroupMean().teaches_nothing([early, late])
    assert not RewardToGo().teaches_nothing([early, late])
    assert RewardToGo().teaches_nothing([early, early])
    early.turn_weight = late.turn_weight = 0.0
    assert RewardToGo().teaches_nothing([early, late])


@pytest.mark.parametrize("advantages", [ReinforcePlusPlus(), GAE(), ArCHer(), Remembering()])
def test_what_a_group_teaches_is_not_known_at_once_beside_a_critic_or_a_memory(
    advantages: Advantages,
) -> None:
    assert not advantages.of_group_alone
    assert all(baseline.of_group_alone for baseline in (GroupMean(), GRPO(), RLOO(), RewardToGo()))


def episode(*turn_rewards: float) -> Rollout:
    """An episode of turns of two tokens, with an observation of one between them."""
    turns = len(turn_rewards)
    one = rollout(sum(turn_rewards), tokens=3 * turns - 1)
    one.versions = ([0, 0, ENVIRONMENT] * turns)[:-1]
    one.turn_ends = [3 * turn + 2 for turn in range(turns)]
    one.turn_rewards = list(turn_rewards)
    return one


def test_a_turn_has_what_comes_after_it_less_the_groups_mean_at_that_turn() -> None:
    found = RewardToGo(0.5).of([episode(0.0, 1.0, 2.0), episode(4.0, 0.0), episode(1.0)])
    to_go = [[1.0, 2.0, 2.0], [4.0, 0.0], [1.0]]
    means = [2.0, 1.0, 2.0]
    for advantages, own in zip(found, to_go, strict=True):
        less = [one - mean for one, mean in zip(own, means, strict=False)]
        spread = [number for one in less for number in (one, one, 0.0)][:-1]
        assert advantages.tolist() == pytest.approx(spread)


def test_a_turn_of_archer_has_its_value_less_that_of_its_state() -> None:
    one, empty = episode(0.0, 1.0), rollout(1.0, tokens=0)
    targets = (9.0, 9.0, 9.0, 9.0)
    one.turn_values = [TurnValues(0.25, 0.75, targets, 1.0), TurnValues(0.5, 0.25, targets, 1.0)]
    found, nothing = ArCHer().of([one, empty])
    assert found.tolist() == [0.5, 0.5, 0.0, -0.25, -0.25]
    assert nothing.tolist() == []


def test_lambda_grows_with_the_length_from_its_floor() -> None:
    for tokens, lam in ((4, 0.6), (40, 0.6), (100, 0.8), (400, 0.95)):
        one = rollout(1.0, tokens=tokens)
        one.values = [0.01 * number for number in range(tokens)]
        (found,), (fixed,) = GAE(0.6, alpha=0.05).of([one]), GAE(lam).of([one])
        torch.testing.assert_close(found, fixed)
