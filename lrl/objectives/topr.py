"""TOPR, tapered off-policy REINFORCE (2503.14286, section 3): good responses at full weight, bad ones only while
likely.

The gradient is  sum_{y: A >= 0} A grad log pi(y)  +  sum_{y: A < 0} min(pi(y) / mu(y), 1) A grad log pi(y),  with the
ratio of the whole response. Pushing down a response that the policy has already left has no floor and is what breaks
uncorrected off-policy training; pulling up a good one has a ceiling of 1 and needs no weight.

Use it for old or foreign responses: replay, large lags, responses of another model. The paper weighs the reward itself;
here, as everywhere in lrl, it is the advantage, so the baseline decides what counts as good.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lrl.objectives.base import Objective, Tokens, clamp_log_ratio


class TOPR(Objective):
    """Policy gradient whose negative responses are weighed by min(pi / mu, 1) of the whole response."""

    def token_losses(self, tokens: Tokens) -> Tensor:
        tapered = self._ratio(tokens).clamp(max=1.0).detach()
        weight = torch.where(tokens.advantages < 0, tapered, 1.0)
        return -weight * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: Tokens) -> Tensor:
        return (tokens.advantages < 0) & (self._ratio(tokens) > 1)

    def _ratio(self, tokens: Tokens) -> Tensor:
        return clamp_log_ratio(tokens.sums(tokens.log_ratio)).exp()[tokens.responses]
