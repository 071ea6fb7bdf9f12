"""PPO's clipped objective (1707.06347, equation 7), with separate bounds on both sides.

The loss is  -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)  with r = pi / mu. A larger
upper bound is DAPO's clip-higher (2503.14476, equation 10), which lets unlikely tokens grow.

Use it when the responses come from about the version before: the larger the lag, the more tokens
are outside the trust region from the start and learn nothing (docs/results/learning.md).
"""

import torch
from torch import Tensor

from lrl.errors import ConfigError, above
from lrl.objectives.base import Objective, Tokens


class PPO(Objective):
    """Clipped policy gradient around the policy that wrote the responses.

    Args:
        epsilon_low: How far pi / mu may fall below 1 before a token of negative advantage stops
            learning; in (0, 1].
        epsilon_high: How far it may rise above 1 before one with a positive advantage does; above
            0. DAPO: 0.28.
    """

    def __init__(self, epsilon_low: float = 0.2, epsilon_high: float = 0.2) -> None:
        check_bounds(type(self).__name__, epsilon_low, epsilon_high)
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high

    def token_losses(self, tokens: Tokens) -> Tensor:
        ratio = self.clipped_ratio(tokens)
        bounded = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        return -torch.minimum(ratio * tokens.advantages, bounded * tokens.advantages)

    def clipped(self, tokens: Tokens) -> Tensor:
        ratio = self.clipped_ratio(tokens)
        rising = (tokens.advantages > 0) & (ratio > 1 + self.epsilon_high)
        falling = (tokens.advantages < 0) & (ratio < 1 - self.epsilon_low)
        return rising | falling

    def clipped_ratio(self, tokens: Tokens) -> Tensor:
        """Returns the ratio that is clipped: float32 [n]."""
        return tokens.ratio


def check_bounds(name: str, epsilon_low: float, epsilon_high: float) -> None:
    """Raises ValueError for bounds that do not enclose a ratio of 1."""
    above(0, name, epsilon_low=float(epsilon_low), epsilon_high=float(epsilon_high))
    if epsilon_low > 1:
        raise ConfigError(f"{name}.epsilon_low is {epsilon_low}; it must be at most 1.")
