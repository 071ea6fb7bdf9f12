"""GSPO (2507.18071, equations 5 to 7): PPO's clip on the ratio of a whole response.

The loss of a response is  -min(s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A)  with
s = (pi(y|x) / mu(y|x))^(1/|y|), the geometric mean of its tokens' ratios. Rewards belong to
responses, so responses are weighed and clipped, and no single token dominates a step. Every token
carries the loss of its response; divided by sequence, as in the paper and by default here, their
mean is the response's loss.

Use it for mixtures of experts and long responses with a small lag. s moves far less than a token's
ratio, so the bounds are hundreds of times narrower than PPO's, and a lag of several versions is
soon outside them.
"""

from torch import Tensor

from lrl.objectives.base import NormaliseBy, Tokens
from lrl.objectives.ppo import PPO


class GSPO(PPO):
    """Clipped policy gradient on the length-normalised ratio of whole responses.

    Args:
        epsilon_low: As for PPO, of s. The paper uses 3e-4.
        epsilon_high: As for PPO, of s. The paper uses 4e-4.
    """

    normalise_by: NormaliseBy = "sequence"
    whole_responses = True

    def __init__(self, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4) -> None:
        super().__init__(epsilon_low, epsilon_high)

    def clipped_ratio(self, tokens: Tokens) -> Tensor:
        return tokens.means(tokens.log_ratio).exp()[tokens.responses]
