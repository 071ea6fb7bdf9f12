"""IcePop (Ling team, 2510.18855): importance weights, without the tokens whose weight is out of
bounds.

The gradient is  sum_t M(pi_t / mu_t) * A * grad log pi_t,  with M(k) = k for low <= k <= high and 0
elsewhere. Truncation (TIS, AIPO) keeps an outlier with the largest weight; IcePop takes it for an
error of computation and drops it, on both sides.

Use it when trainer and generator compute the policy differently (mixture of experts, quantised
generators), so that large ratios are noise. When they come from lag, AIPO keeps the signal.
"""

from torch import Tensor

from lrl.errors import ConfigError
from lrl.objectives.base import Objective, Tokens


class IcePop(Objective):
    """Importance-weighted policy gradient on the tokens with a weight within bounds.

    Args:
        low: Smallest weight pi / mu that is trained; in (0, 1]. The paper uses 0.5.
        high: Largest one; at least 1. The paper uses 5.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        if not 0 < low <= 1 <= high:
            raise ConfigError(f"IcePop(low={low}, high={high}): use 0 < low <= 1 <= high.")
        self.low = low
        self.high = high

    def token_losses(self, tokens: Tokens) -> Tensor:
        weight = tokens.ratio.detach().masked_fill(self.clipped(tokens), 0.0)
        return -weight * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: Tokens) -> Tensor:
        return (tokens.ratio < self.low) | (tokens.ratio > self.high)
