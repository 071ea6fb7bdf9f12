"""How good an answer is, relative to its group.

A baseline sees one group's rewards and nothing else, so groups can be packed and trained in whatever order they finish.
Answers without a reward are left out before: an error is not a reward, and must not move the baseline either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Advantages(ABC):
    """Turns the rewards of one group into the advantages of its answers."""

    min_rollouts: int = 2
    """Scored answers below which a group says nothing; it is then discarded and counted."""

    @abstractmethod
    def __call__(self, rewards: Tensor) -> Tensor:
        """Advantage of every answer.

        Args:
            rewards: float32 [n], the scored answers of one group, n >= `min_rollouts`.

        Returns:
            float32 [n].
        """


class GroupMean(Advantages):
    """Reward minus the group's mean: the baseline of LlamaRL (2505.24034), v(x) = 1/n sum_i r(x, y_i).

    Not divided by the standard deviation: that would weigh nearly solved and nearly hopeless prompts most.
    """

    def __call__(self, rewards: Tensor) -> Tensor:
        return rewards - rewards.mean()
