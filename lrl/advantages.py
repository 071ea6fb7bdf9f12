"""Advantages: the quality of a response relative to its group.

A baseline sees one group at a time, so groups are packed and trained in the order in which they
finish. Responses without a reward are left out: an error is not a reward, and must not move the
baseline either.

Notation: r_i is the reward of response i of n, mean and std are over the group. Both are computed
exactly, so equal rewards have advantages of exactly 0; the rest is float64 until `of` returns.

With a critic an advantage is relative to the critic's values of the same response: `GAE` with
`lrl.Critic`, `ArCHer` with `lrl.TurnCritic`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from statistics import mean, pvariance, stdev
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lrl.errors import ConfigError, one_of
from lrl.types import Rollout, Turn

Over = Literal["token", "turn"]


class Advantages(ABC):
    """Turns the rewards of one group into the advantages of its responses. `Baseline` is for those
    that need only the rewards."""

    min_rollouts: int = 2
    """Least scored responses of a group; a group with fewer is discarded and counted."""
    needs_critic: bool = False
    """Whether `of` reads `Rollout.values`, which only a critic (`lrl.Critic`) gives."""
    needs_turn_critic: bool = False
    """Whether that critic must be `lrl.TurnCritic`, for `Rollout.turn_values`."""

    @abstractmethod
    def of(self, rollouts: Sequence[Rollout]) -> Sequence[Tensor]:
        """Returns the advantages of a group's scored responses, one tensor each.

        Args:
            rollouts: The n scored responses, n >= `min_rollouts`.

        Returns:
            For each response float32 [], one number for all its tokens, or float32 [tokens].
        """

    @property
    def of_group_alone(self) -> bool:
        """Whether `of` reads a scored group and nothing else: no critic's values, and nothing that
        `end_step` has learnt."""
        return not self.needs_critic and type(self).end_step is Advantages.end_step

    def teaches_nothing(self, rollouts: Sequence[Rollout]) -> bool:
        """Whether a group with these responses is trained and all of its advantages are 0."""
        scored = [rollout for rollout in rollouts if rollout.reward is not None]
        return len(scored) >= self.min_rollouts and not any(one.any() for one in self.of(scored))

    def end_step(self, rewards: Tensor) -> None:  # noqa: B027 (most have no state)
        """Receives all rewards of a step, float64 [n] in any order, when its optimizer step is
        done."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of a checkpoint, in plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restores the state of `state_dict`."""


class Baseline(Advantages):
    """One advantage for all tokens of a response, from the rewards of its group. A subclass defines
    `__call__`."""

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """Returns the advantage of every response.

        Args:
            rewards: float64 [n], the scored responses of one group, n >= `min_rollouts`.

        Returns:
            float64 [n].
        """

    def of(self, rollouts: Sequence[Rollout]) -> Sequence[Tensor]:
        return list(self(rewards_of(rollouts)).float())


def rewards_of(rollouts: Iterable[Rollout]) -> Tensor:
    """Returns float64 [n]: the rewards of scored responses less their KL penalty."""
    rewards = [
        rollout.reward - rollout.kl_penalty for rollout in rollouts if rollout.reward is not None
    ]
    return torch.tensor(rewards, dtype=torch.float64)


class GroupMean(Baseline):
    """r_i - mean: the baseline of LlamaRL (2505.24034), v(x) = 1/n sum_i r(x, y_i).

    Not divided by the standard deviation: that would weigh nearly solved and nearly hopeless
    prompts most.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        return rewards - mean(rewards.tolist())


class DrGRPO(GroupMean):
    """r_i - mean: Dr. GRPO (2503.20783, section 3.2), GRPO without both of its divisions.

    Its other half is the loss: set `model.normalise_by` to `data.max_response_tokens`.
    """


class GRPO(Baseline):
    """(r_i - mean) / (std + epsilon): GRPO (2402.03300, section 4.1.2), std with n - 1.

    Args:
        epsilon: Added to std; keeps groups of equal rewards at 0.
    """

    def __init__(self, epsilon: float = 1e-4) -> None:
        if not epsilon > 0:
            raise ConfigError(
                f"GRPO(epsilon={epsilon}): it must be above 0, or groups of equal rewards divide "
                "by 0."
            )
        self.epsilon = epsilon

    def __call__(self, rewards: Tensor) -> Tensor:
        numbers = rewards.tolist()
        return (rewards - mean(numbers)) / (stdev(numbers) + self.epsilon)


class RLOO(Baseline):
    """r_i - mean of the other responses: REINFORCE leave-one-out (2402.14740, section 3.2).

    It has no bias, since no response is part of its own baseline; it equals n / (n - 1) times
    `GroupMean`.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        n = len(rewards)
        return (rewards - mean(rewards.tolist())) * n / (n - 1)


class ReinforcePlusPlus(Baseline):
    """(r_i - m) / s with m and s over all responses, not over the group: REINFORCE++ (2501.03262,
    section 3).

    The paper takes m and s over the batch. Here groups are trained before their step is complete,
    so m and s are running moments of the steps before (each step has weight 1 - decay), which do
    not depend on the order of arrival. Until the first step is done, they are the group's own
    moments.

    Args:
        decay: Weight of the past in the running moments; in [0, 1). 0 takes the last step alone.
        epsilon: Added to s.
    """

    min_rollouts = 1

    def __init__(self, decay: float = 0.9, epsilon: float = 1e-4) -> None:
        if not 0 <= decay < 1 or not epsilon > 0:
            raise ConfigError(
                f"ReinforcePlusPlus(decay={decay}, epsilon={epsilon}): it must be 0 <= decay < 1 "
                "and epsilon > 0."
            )
        self.decay = decay
        self.epsilon = epsilon
        self._moments: tuple[float, float] | None = None  # running mean and variance of r

    def __call__(self, rewards: Tensor) -> Tensor:
        middle, variance = self._moments or _moments(rewards)
        return (rewards - middle) / (math.sqrt(variance) + self.epsilon)

    def end_step(self, rewards: Tensor) -> None:
        if not len(rewards):
            return
        middle, variance = _moments(rewards)
        before, variance_before = self._moments or (middle, variance)
        share = 1 - self.decay
        apart = middle - before
        self._moments = (
            before + share * apart,
            self.decay * variance_before + share * variance + self.decay * share * apart**2,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"mean_and_variance": list(self._moments) if self._moments else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        moments = state.get("mean_and_variance")
        self._moments = (moments[0], moments[1]) if moments else None


def _moments(rewards: Tensor) -> tuple[float, float]:
    """Returns mean and variance, exact to a rounding, so in any order."""
    numbers = rewards.tolist()
    return mean(numbers), pvariance(numbers)


class RewardToGo(Advantages):
    """G_t - mean: what an episode gets from turn t on, G_t = r_t + gamma G_{t+1}, less the mean over
    the group's episodes that have a turn t.

    All tokens of a turn share its advantage. A turn that no other episode of the group has reached
    has none to be compared with: its advantage is 0. Without an environment it is `GroupMean`.

    Args:
        gamma: Discount of a turn; in [0, 1].
    """

    def __init__(self, gamma: float = 1.0) -> None:
        if not 0 <= gamma <= 1:
            raise ConfigError(f"RewardToGo(gamma={gamma}): it must be in [0, 1].")
        self.gamma = gamma

    def of(self, rollouts: Sequence[Rollout]) -> Sequence[Tensor]:
        by_turn: list[list[float]] = []
        for rollout in rollouts:
            rewards = rewards_by_action(rollout, rollout.turns)
            by_turn.append(discounted(rewards, self.gamma))
        means = []
        for at_turn in zip_longest(*by_turn):
            reached = [one for one in at_turn if one is not None]
            means.append(mean(reached))
        found = []
        for rollout, to_go in zip(rollouts, by_turn, strict=True):
            advantages = [one - middle for one, middle in zip(to_go, means, strict=False)]
            found.append(_spread(rollout, rollout.turns, advantages))
        return found


class GAE(Advantages):
    """Generalised advantage estimation over the policy's tokens, undiscounted (1506.02438, equation
    16): A_t = sum_k lam^k (r_{t+k} + V_{t+k+1} - V_{t+k}).

    V is the value of `lrl.Critic` before each token, 0 after the last; the reward comes with the
    last token, but an environment's for a turn with the last of the turn. Needs `model.critic`. A
    group may have a single response.

    Args:
        lam: lambda, in [0, 1]: 1 is the reward less the value, without bias; below it there is less
            noise, and a bias by the critic's errors.
        alpha: Raises lambda with a response's length l to max(`lam`, 1 - 1 / (alpha l)): as far as
            it reaches, noise and bias are in the same proportion at all lengths (length-adaptive
            GAE, VAPO, 2504.05118: 0.05). `lam` is the floor, because the formula is below 0 for
            short responses. Null takes `lam` for all.
        over: What A and V are of: each `token`, or each `turn`, whose tokens then share the
            advantage of its start.
    """

    min_rollouts = 1
    needs_critic = True

    def __init__(self, lam: float = 1.0, alpha: float | None = None, over: Over = "token") -> None:
        if not 0 <= lam <= 1:
            raise ConfigError(f"GAE(lam={lam}): it must be in [0, 1].")
        if alpha is not None and not alpha > 0:
            raise ConfigError(f"GAE(alpha={alpha}): it must be above 0, or null.")
        if alpha is not None and lam == 1:
            raise ConfigError(
                f"GAE(alpha={alpha}, lam=1.0): lam is the least lambda, so alpha would change "
                "nothing. Set lam below 1, such as 0.9."
            )
        one_of("GAE", over=(get_args(Over), over))
        self.lam = lam
        self.alpha = alpha
        self.over = over

    def of(self, rollouts: Sequence[Rollout]) -> Sequence[Tensor]:
        found = []
        for rollout in rollouts:
            actions = of_tokens(rollout) if self.over == "token" else rollout.turns
            found.append(gae(rollout, actions, self._lam(len(actions))))
        return found

    def _lam(self, length: int) -> float:
        if self.alpha is None or not length:
            return self.lam
        return max(self.lam, 1 - 1 / (self.alpha * length))


class ArCHer(Advantages):
    """min(Q1, Q2) - min(V1, V2) of each turn (2402.19446), at all of the turn's tokens.

    Q is the value of the turn as it was written, V that of the state before it. Needs
    `lrl.TurnCritic` as `model.critic`. A group may have a single response.
    """

    min_rollouts = 1
    needs_critic = True
    needs_turn_critic = True

    def of(self, rollouts: Sequence[Rollout]) -> Sequence[Tensor]:
        found = []
        for rollout in rollouts:
            values = rollout.turn_values or []
            found.append(_spread(rollout, rollout.turns, [one.advantage for one in values]))
        return found


def of_tokens(rollout: Rollout) -> list[Turn]:
    return [Turn(index, index + 1) for index, own in enumerate(rollout.mask) if own]


def gae(rollout: Rollout, actions: Sequence[Turn], lam: float) -> Tensor:
    """Returns float32 [tokens]: the advantages of `GAE` at all tokens of each of a scored rollout's
    actions, 0 elsewhere. The value of an action is that before its first token."""
    if not actions:
        return torch.zeros(len(rollout.token_ids))
    assert rollout.values is not None
    rewards = rewards_by_action(rollout, actions)
    values = [rollout.values[action.start] for action in actions]
    errors = [
        reward + after - value
        for reward, after, value in zip(rewards, [*values[1:], 0.0], values, strict=True)
    ]
    return _spread(rollout, actions, discounted(errors, lam))


def rewards_by_action(rollout: Rollout, actions: Sequence[Turn]) -> list[float]:
    """Returns the reward of each action of a scored rollout; they add up to its reward less its KL
    penalty.

    An environment's reward for a turn, weighted as in that reward, comes with the turn's last
    action, the rest with the last action of all.
    """
    assert rollout.reward is not None
    given = dict(zip(rollout.turn_ends, rollout.turn_rewards, strict=False))
    rewards = [rollout.turn_weight * given.get(action.stop, 0.0) for action in actions]
    if rewards:
        rewards[-1] += rollout.reward - rollout.kl_penalty - sum(rewards)
    return rewards


def discounted(numbers: Sequence[float], discount: float) -> list[float]:
    backwards = accumulate(reversed(numbers), lambda ahead, number: number + discount * ahead)
    return list(backwards)[::-1]


def _spread(rollout: Rollout, actions: Sequence[Turn], numbers: Sequence[float]) -> Tensor:
    """Returns float32 [tokens]: the number of each action at all of its tokens, 0 elsewhere."""
    found = torch.zeros(len(rollout.token_ids))
    for action, number in zip(actions, numbers, strict=True):
        found[action.start : action.stop] = number
    return found
