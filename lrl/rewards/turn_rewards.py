"""The rewards of an environment, as one reward of the response."""

from collections.abc import Sequence
from typing import Any

from lrl.rewards.base import Reward


class TurnRewards(Reward):
    """The sum of the environment's rewards for the turns; 0 without an environment.

    A run with an environment has it without being asked. Name it for another weight.
    """

    name = "environment"

    def __call__(
        self, prompt: str, response: str, *, turn_rewards: Sequence[float] = (), **columns: Any
    ) -> float:
        """Returns the sum. The pool passes `turn_rewards`."""
        return float(sum(turn_rewards))
