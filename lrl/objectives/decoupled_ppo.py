"""Decoupled PPO, the objective of AReaL (2505.24298, section 5.2): a clip around a policy newer
than the writer.

The loss is  -w min(u A, clip(u, 1 - epsilon_low, 1 + epsilon_high) A)  with w = pi_prox / mu,
detached, and u = pi / pi_prox. mu wrote the token; pi_prox, the proximal policy, is one step behind
the policy that learns, so the trust region moves along with it.

AReaL runs the model once more for log pi_prox. Here it is interpolated from the token's lag d, as
AReaL offers too (A-3PO, 2512.06547):  log pi_prox = log mu + (1 - 1/d) (log pi - log mu),
detached, and pi itself for d = 0. At lag 1 pi_prox is mu, and the loss is PPO's.

Use it instead of PPO at lags above 1. Unless it clips, it is the plain importance-weighted
gradient.
"""

import torch
from torch import Tensor

from lrl.errors import at_least
from lrl.objectives.base import Tokens, clamp_log_ratio
from lrl.objectives.ppo import PPO


class DecoupledPPO(PPO):
    """PPO's clip around a proximal policy, importance-weighted by the ratio of that policy to the
    token's writer.

    Args:
        epsilon_low: As for PPO, of pi / pi_prox.
        epsilon_high: As for PPO, of pi / pi_prox.
        max_weight: Tokens with a weight pi_prox / mu above this are left out of the loss; None
            keeps all, which is the paper's formula, and lets a single token decide a step.
    """

    def __init__(
        self, epsilon_low: float = 0.2, epsilon_high: float = 0.2, max_weight: float | None = 5.0
    ) -> None:
        super().__init__(epsilon_low, epsilon_high)
        at_least(1, "DecoupledPPO", max_weight=max_weight)  # the weight on-policy
        self.max_weight = max_weight

    def token_losses(self, tokens: Tokens) -> Tensor:
        return self._weight(tokens) * super().token_losses(tokens)

    def clipped(self, tokens: Tokens) -> Tensor:
        return (self._weight(tokens) == 0) | super().clipped(tokens)

    def clipped_ratio(self, tokens: Tokens) -> Tensor:
        proximal = tokens.behaviour_logprobs + _log_weight(tokens)
        return clamp_log_ratio(tokens.logprobs - proximal).exp()

    def _weight(self, tokens: Tokens) -> Tensor:
        weight = clamp_log_ratio(_log_weight(tokens)).exp()
        if self.max_weight is None:
            return weight
        return weight.masked_fill(weight > self.max_weight, 0.0)


def _log_weight(tokens: Tokens) -> Tensor:
    """Returns log pi_prox - log mu, detached: float32 [n]."""
    share = torch.where(tokens.lags == 0, 1.0, 1 - 1 / tokens.lags.clamp(min=1))
    return share * (tokens.logprobs.detach() - tokens.behaviour_logprobs)
