"""TOPR, tapered off-policy REINFORCE (2503.14286, section 3): bad responses lose weight as they
become unlikely.

The gradient is  sum_{y: A >= 0} A grad log pi(y)  +  sum_{y: A < 0} min(pi(y) / mu(y), 1) A grad
log pi(y),  with the ratio of the whole response. The log-prob of a bad response has no lower limit:
pushing down one that is already unlikely breaks uncorrected off-policy training. A good one cannot
rise above 0 and needs no weight.

Use it for old or foreign responses: replay, large lags, responses of another model. The paper
weighs the reward itself; here it is the advantage, so the baseline decides what is good.
"""

import torch
from torch import Tensor

from lrl.objectives.base import Objective, Tokens


class TOPR(Objective):
    """Policy gradient whose negative responses are weighed by min(pi / mu, 1) of the whole
    response."""

    whole_responses = True

    def token_losses(self, tokens: Tokens) -> Tensor:
        weight = torch.where(
            tokens.advantages < 0, tokens.response_ratio.clamp(max=1.0).detach(), 1.0
        )
        return -weight * tokens.advantages * tokens.logprobs

    def clipped(self, tokens: Tokens) -> Tensor:
        return (tokens.advantages < 0) & (tokens.response_ratio > 1)
