"""TBA, trajectory balance with asynchrony (2503.18929): fit the policy to
pi*(y|x) ~ pi_ref(y|x) exp(r(y) / beta).

With  c_j = log pi_ref(y_j|x) - log pi(y_j|x) + r_j / beta  over the K trained responses of a group,
trajectory balance in its VarGrad form is  1/K sum_j (SG[mean_i c_i] - c_j)^2,  where SG stops the
gradient and log-probs are summed over a response. No importance ratio is used, so responses may be
of any age. On-policy its gradient is REINFORCE with A_j = (r_j - mean r) - beta (KL_j - mean KL);
the loss here is multiplied by beta / 2, which makes the gradients equal in size too.

The mean needs all responses of a group under the newest policy, so micro-batches hold groups whole.
(The published code takes the mean over consecutive responses, which is right only while a
micro-batch holds a single prompt.)

Use it with a replay buffer (`data.replay`), on responses too old for importance weights. Advantages
must be rewards minus the group's mean (`GroupMean`), not divided by anything.
"""

import torch
from torch import Tensor

from lrl.errors import above
from lrl.objectives.base import NormaliseBy, Objective, Tokens, sum_by


class TBA(Objective):
    """Squared violation of trajectory balance, centred in each group.

    Args:
        beta: Weight of staying near the reference against the reward; above 0. The paper ends at
            0.004 to 0.05.
    """

    normalise_by: NormaliseBy = "sequence"
    whole_groups = True
    whole_responses = True
    needs_reference = True
    needs_group_mean = True

    def __init__(self, beta: float = 0.01) -> None:
        above(0, "TBA", beta=float(beta))  # the optimum divides the reward by it
        self.beta = beta

    def token_losses(self, tokens: Tokens) -> Tensor:
        assert tokens.reference_logprobs is not None, "PolicyModule sees to `needs_reference`"
        # Log pi(y) - log pi_ref(y): [S].
        excess = tokens.sums(tokens.logprobs - tokens.reference_logprobs)
        group = tokens.means(tokens.groups.float()).round().long()  # [S]
        # An advantage is the reward minus a number that its group shares, which the mean below,
        # over the trained responses alone, removes.
        minus_c = excess - tokens.means(tokens.advantages) / self.beta
        count = tokens.num_groups
        responses = sum_by(group, torch.ones_like(minus_c), count)
        means = sum_by(group, minus_c.detach(), count) / responses  # [G]
        imbalance = minus_c - means[group]
        return (self.beta / 2 * imbalance.square())[tokens.responses]
