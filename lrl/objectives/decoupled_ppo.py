"""Decoupled PPO, the objective of AReaL (2505.24298, section 5.2): one policy to correct from, another to stay near.

The loss is  -w min(u A, clip(u, 1 - epsilon_low, 1 + epsilon_high) A)  with w = pi_prox / mu, held fixed, and
u = pi / pi_prox. mu wrote the token; pi_prox, the proximal policy, is one step behind the policy that learns. So the
trust region moves along with the policy, however old the response is.

AReaL runs the model once more for log pi_prox. Here it is interpolated from the token's lag d, as AReaL offers too
(A-3PO, 2512.06547):  log pi_prox = log mu + (1 - 1/d) (log pi - log mu),  held fixed, and pi itself for d = 0. At lag 1
pi_prox is mu, and the loss is PPO's.

Use it instead of PPO at lags above 1. Where it does not clip, it is the plain importance-weighted gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrl.objectives.base import Objective, Tokens, clamp_log_ratio
from lrl.objectives.ppo import check_bounds, clipped_losses, outside
from lrl.runtime.config_errors import fault


class DecoupledPPO(Objective):
    """PPO's clip around a proximal policy, importance-weighted by how far that one is from the writer of the token.

    Args:
        epsilon_low: As for PPO, of pi / pi_prox.
        epsilon_high: As for PPO, of pi / pi_prox.
        max_weight: Tokens whose weight pi_prox / mu is above this are left out of the loss; None keeps all, which is
            the paper's formula, and lets a single token decide a step.

    Raises:
        ValueError: A bound is outside its range.
    """

    def __init__(self, epsilon_low: float = 0.2, epsilon_high: float = 0.2, max_weight: float | None = 5.0) -> None:
        check_bounds("DecoupledPPO", epsilon_low, epsilon_high)
        if max_weight is not None and not max_weight >= 1:
            fault(f"DecoupledPPO(max_weight={max_weight}): use at least 1, the weight on-policy.")
        self.epsilon_low = epsilon_low
        self.epsilon_high = epsilon_high
        self.max_weight = max_weight

    def token_losses(self, tokens: Tokens) -> Tensor:
        proximal, weight = self._proximal(tokens)
        losses = clipped_losses(
            clamp_log_ratio(tokens.logprobs - proximal).exp(), tokens.advantages, self.epsilon_low, self.epsilon_high
        )
        return weight * losses

    def clipped(self, tokens: Tokens) -> Tensor:
        proximal, weight = self._proximal(tokens)
        ratio = clamp_log_ratio(tokens.logprobs - proximal).exp()
        return (weight == 0) | outside(ratio, tokens.advantages, self.epsilon_low, self.epsilon_high)

    def _proximal(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """log pi_prox and the weight pi_prox / mu, 0 above `max_weight`: both float32 [n] and held fixed."""
        lags = tokens.lags.clamp(min=1)
        share = torch.where(tokens.lags == 0, 1.0, 1 - 1 / lags)
        step = share * (tokens.logprobs.detach() - tokens.behaviour_logprobs)
        weight = clamp_log_ratio(step).exp()
        if self.max_weight is not None:
            weight = weight.masked_fill(weight > self.max_weight, 0.0)
        return tokens.behaviour_logprobs + step, weight
