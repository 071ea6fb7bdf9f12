"""CISPO (MiniMax-M1, 2506.13585, equations 4 and 5): the importance weight is clipped, no token
stops learning.

The gradient is  sum_t clip(r_t, 1 - epsilon_low, 1 + epsilon_high) * A * grad log pi_t,  with
r = pi / mu and the clipped weight detached. PPO's clip removes the gradient of a token, also of the
rare tokens that begin a new thought; here only the weight stops growing.

Use it like AIPO, which it equals for epsilon_low = 1 and rho = 1 + epsilon_high; a lower bound
keeps some weight on tokens that have become unlikely.
"""

from torch import Tensor

from lrl.objectives.base import Objective, Tokens
from lrl.objectives.ppo import check_bounds


class CISPO(Objective):
    """Importance-weighted policy gradient, the weight clipped on both sides.

    Args:
        epsilon_low: The weight is at least 1 - epsilon_low; 1 sets no lower bound, as the paper
            does.
        epsilon_high: The weight is at most 1 + epsilon_high. The paper tunes it and gives no value.
    """

    def __init__(self, epsilon_low: float = 1.0, epsilon_high: float = 4.0) -> None:
        check_bounds("CISPO", epsilon_low, epsilon_high)
        self.low = 1 - epsilon_low
        self.high = 1 + epsilon_high

    def token_losses(self, tokens: Tokens) -> Tensor:
        weight = tokens.ratio.clamp(self.low, self.high).detach()
        return -weight * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: Tokens) -> Tensor:
        return (tokens.ratio < self.low) | (tokens.ratio > self.high)
