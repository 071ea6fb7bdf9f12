"""AIPO, the objective of LlamaRL (2505.24034): policy gradient on responses of an older policy,
truncated on one side.

The gradient is  sum_t min(pi_t / mu_t, rho) * A * grad log pi_t,  with mu the policy that wrote the
token and pi the policy that learns. As in IMPALA's V-trace (1802.01561), and unlike PPO's clip, the
weight corrects towards the newest policy and does not hold it near the last one.
"""

from torch import Tensor

from lrl.errors import at_least
from lrl.objectives.base import Objective, Tokens


class AIPO(Objective):
    """Importance-weighted policy gradient, the weight truncated at rho.

    Args:
        rho: Largest importance weight pi / mu of a token. LlamaRL found values in [2, 10] to work
            well; at least 1.
    """

    def __init__(self, rho: float = 4.0) -> None:
        at_least(1, "AIPO", rho=float(rho))  # the weight of an on-policy token
        self.rho = rho

    def token_losses(self, tokens: Tokens) -> Tensor:
        # Detached: through min(ratio, rho) * A the gradient would be 0, not rho * A * grad log pi,
        # above rho.
        weight = tokens.ratio.clamp(max=self.rho).detach()
        return -weight * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: Tokens) -> Tensor:
        return tokens.ratio > self.rho
