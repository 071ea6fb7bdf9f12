"""How good a response is, relative to its group.

A baseline sees one group at a time, so groups can be packed and trained in whatever order they finish. Responses
without a reward are left out before: an error is not a reward, and must not move the baseline either.

Notation: r_i is the reward of response i of n, mean and std are over the group.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lrl.runtime.config_errors import fault
from lrl.types import Rollout


class Advantages(ABC):
    """Turns the rewards of one group into the advantages of its responses.

    A subclass writes `__call__`; for an advantage per token, it overrides `of` instead.
    """

    min_rollouts: int = 2
    """Scored responses below which a group says nothing; it is then discarded and counted."""

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """Advantage of every response.

        Args:
            rewards: float32 [n], the scored responses of one group, n >= `min_rollouts`.

        Returns:
            float32 [n].
        """

    def of(self, rollouts: Sequence[Rollout]) -> Sequence[Tensor]:
        """Advantages of a group's scored responses, one tensor each.

        Args:
            rollouts: The n scored responses, n >= `min_rollouts`.

        Returns:
            For each response float32 [], one number for all its tokens, or float32 [tokens], one for each.
        """
        return list(self(rewards_of(rollouts)))

    def end_step(self, rewards: Tensor) -> None:  # noqa: B027 (most baselines remember nothing)
        """Told of all rewards of a step, float32 [n] in any order, after its last group was packed."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold, in plain numbers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on where `state_dict` was taken."""


def rewards_of(rollouts: Sequence[Rollout]) -> Tensor:
    """float32 [n]: rewards of scored responses, less what a KL to the reference takes off."""
    rewards = [rollout.reward - rollout.kl_penalty for rollout in rollouts if rollout.reward is not None]
    return torch.tensor(rewards, dtype=torch.float32)


class GroupMean(Advantages):
    """r_i - mean: the baseline of LlamaRL (2505.24034), v(x) = 1/n sum_i r(x, y_i).

    Not divided by the standard deviation: that would weigh nearly solved and nearly hopeless prompts most.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        return rewards - rewards.mean()


class DrGRPO(GroupMean):
    """r_i - mean: Dr. GRPO (2503.20783, section 3.2), which takes both of GRPO's divisions away.

    The other half of it is the loss: set `model.normalise_by` to `data.max_response_tokens`.
    """


class GRPO(Advantages):
    """(r_i - mean) / (std + epsilon): GRPO (2402.03300, section 4.1.2), std with n - 1.

    Args:
        epsilon: Keeps groups of equal rewards at 0.
    """

    def __init__(self, epsilon: float = 1e-4) -> None:
        if not epsilon > 0:
            fault(f"GRPO(epsilon={epsilon}): it must be above 0, or groups of equal rewards divide by 0.")
        self.epsilon = epsilon

    def __call__(self, rewards: Tensor) -> Tensor:
        return (rewards - rewards.mean()) / (rewards.std() + self.epsilon)


class RLOO(Advantages):
    """r_i - mean of the other answers: REINFORCE leave-one-out (2402.14740, section 3.2).

    Without bias, since no response is part of its own baseline; it equals n / (n - 1) times `GroupMean`.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        n = len(rewards)
        return rewards - (rewards.sum() - rewards) / (n - 1)


class ReinforcePlusPlus(Advantages):
    """(r_i - m) / s with m and s over all responses, not over the group: REINFORCE++ (2501.03262, section 3).

    The paper takes m and s over the batch. Groups are trained here before their step is complete, so m and s are those
    of the steps before, which keeps the advantage independent of the order of arrival: running moments, each step's
    weighed with 1 - decay. Before the first step is done, the group's own moments serve.

    Args:
        decay: Share of the past in the running moments; in [0, 1). 0 takes the last step alone.
        epsilon: Added to s.

    Raises:
        ValueError: A setting is outside its range.
    """

    min_rollouts = 1

    def __init__(self, decay: float = 0.9, epsilon: float = 1e-4) -> None:
        if not 0 <= decay < 1 or not epsilon > 0:
            fault(f"ReinforcePlusPlus(decay={decay}, epsilon={epsilon}): it must be 0 <= decay < 1 and epsilon > 0.")
        self.decay = decay
        self.epsilon = epsilon
        self._moments: tuple[float, float] | None = None  # running means of r and of r^2

    def __call__(self, rewards: Tensor) -> Tensor:
        if self._moments is None:
            return (rewards - rewards.mean()) / (rewards.std(correction=0) + self.epsilon)
        mean, square = self._moments
        return (rewards - mean) / (math.sqrt(max(square - mean**2, 0.0)) + self.epsilon)

    def end_step(self, rewards: Tensor) -> None:
        """Fold a step's rewards in."""
        if not len(rewards):
            return
        exact = rewards.double()  # whose sums do not depend on the order, to float32's precision
        new = exact.mean().item(), exact.square().mean().item()
        old = self._moments or new
        self._moments = (
            self.decay * old[0] + (1 - self.decay) * new[0],
            self.decay * old[1] + (1 - self.decay) * new[1],
        )

    def state_dict(self) -> dict[str, Any]:
        """The running moments."""
        return {"moments": list(self._moments) if self._moments else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with them."""
        moments = state.get("moments")
        self._moments = (moments[0], moments[1]) if moments else None
