"""Truncated importance sampling: the weight pi / mu, of a token or of a whole response, cut off
above `cap`.

The gradient is  sum_t min(w, cap) * A * grad log pi_t.  Per token, w = pi_t / mu_t (Yao et al.,
"Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025): the formula of
AIPO, there meant for the difference between two programs that compute one policy, so with a smaller
cap. Per sequence, w is the product over the response (Liu et al., "When Speed Kills Stability",
2025): unbiased for whole responses as long as nothing is cut, but its spread grows with the length.

Use the token level for responses of hundreds of tokens or more, the sequence level for short ones.
"""

from typing import Literal, get_args

from torch import Tensor

from lrl.errors import at_least, one_of
from lrl.objectives.base import Objective, Tokens

Level = Literal["token", "sequence"]


class TIS(Objective):
    """Importance-weighted policy gradient, the weight truncated.

    Args:
        cap: Largest weight; at least 1.
        level: `token` weighs each token by its own ratio, `sequence` all tokens of a response by
            the response's.
    """

    def __init__(self, cap: float = 2.0, level: Level = "token") -> None:
        at_least(1, "TIS", cap=float(cap))  # the weight of an on-policy token
        one_of("TIS", level=(get_args(Level), level))
        self.cap = cap
        self.level = level
        self.whole_responses = level == "sequence"

    def token_losses(self, tokens: Tokens) -> Tensor:
        weight = self._ratio(tokens).clamp(max=self.cap).detach()
        return -weight * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: Tokens) -> Tensor:
        return self._ratio(tokens) > self.cap

    def _ratio(self, tokens: Tokens) -> Tensor:
        return tokens.ratio if self.level == "token" else tokens.response_ratio
