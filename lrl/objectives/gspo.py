"""GSPO (2507.18071, equations 5 to 7): PPO's clip on the ratio of a whole response.

The loss of a response is  -min(s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A)  with s = (pi(y|x) /
mu(y|x))^(1/|y|), the geometric mean of its tokens' ratios. Rewards are given to responses, so responses are weighed and
clipped, and single tokens cannot throw a step off. Every token carries its response's loss; divided by sequence, as the
paper does and as is the default here, their mean is the response's loss.

Use it for mixtures of experts and long responses with a small lag. s moves far less than a token's ratio, so the bounds
are hundreds of times narrower than PPO's, and a lag of several versions is soon outside them.
"""

from __future__ import annotations

from torch import Tensor

from lrl.objectives.base import Objective, Tokens
from lrl.objectives.normalisation import NormaliseBy
from lrl.objectives.ppo import check_bounds, clipped_losses, outside


class GSPO(Objective):
    """Clipped policy gradient on the length-normalised ratio of whole responses.

    Args:
        epsilon_low: As for PPO, of s. The paper uses 3e-4.
        epsilon_high: As for PPO, of s. The paper uses 4e-4.

    Raises:
        ValueError: A bound is outside its range.
    """

    normalise_by: NormaliseBy = "sequence"

    def __init__(self, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> None:
        check_bounds("GSPO", epsilon_low, epsilon_high)
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high

    def token_losses(self, tokens: Tokens) -> Tensor:
        return clipped_losses(self._ratio(tokens), tokens.advantages, self.epsilon_low, self.epsilon_high)

    def clipped(self, tokens: Tokens) -> Tensor:
        return outside(self._ratio(tokens), tokens.advantages, self.epsilon_low, self.epsilon_high)

    def _ratio(self, tokens: Tokens) -> Tensor:
        return tokens.means(tokens.log_ratio).exp()[tokens.responses]
