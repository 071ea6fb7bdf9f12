"""REINFORCE (Williams, 1992), with no correction for the policy that wrote the responses.

The gradient is  sum_t A * grad log pi_t.  It is right on-policy (`data.max_lag: 0`) and biased for
every other lag: the control that shows the effect of a correction, and the plainest objective if
there is nothing to correct.
"""

from torch import Tensor

from lrl.objectives.base import Objective, Tokens


class REINFORCE(Objective):
    """Policy gradient without importance weights. Use it on-policy, or as a control."""

    def token_losses(self, tokens: Tokens) -> Tensor:
        return -tokens.advantages * tokens.logprobs
