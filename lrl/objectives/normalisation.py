"""The divisor of a step's losses: a weight for each token, and one number for the whole step.

The number is known when the step ends, so the gradient does not depend on how the step was packed.
"""

from typing import Literal

import torch
from torch import Tensor

from lrl.system.config_errors import fault
from lrl.types import Step

NormaliseBy = Literal["token", "sequence"] | int
"""`token`: by all trained tokens of the step, so each counts alike (DAPO, 2503.14476, section 3.3).
`sequence`: by the response's own tokens, then by the number of responses, so each response counts
alike (GRPO, 2402.03300, equation 3). A number: by that number of tokens and by the number of
responses; with the longest length allowed it is Dr. GRPO (2503.20783)."""


def check_normalise_by(by: NormaliseBy) -> NormaliseBy:
    """Returns `by`; reports a fault if it is no divisor."""
    if by not in ("token", "sequence") and not (isinstance(by, int) and by > 0):
        fault(f"model.normalise_by is {by!r}: use token, sequence, or a number of tokens above 0.")
    return by


def token_weights(
    by: NormaliseBy,
    responses: Tensor,
    response_tokens: Tensor | None = None,
    num_responses: int | None = None,
) -> Tensor:
    """Returns the factor of each token's loss, float32 [n].

    Args:
        by: The divisor.
        responses: The response of each token, int64 [n].
        response_tokens: `MicroBatch.response_tokens` of each token, [n]; None if all tokens of each
            response are here.
        num_responses: As for `sum_by`.
    """
    ones = torch.ones(responses.shape, device=responses.device)
    if by != "sequence":
        return ones
    if response_tokens is not None:
        return ones / response_tokens
    return 1 / sum_by(responses, ones, num_responses)[responses]


def sum_by(ids: Tensor, values: Tensor, count: int | None = None) -> Tensor:
    """Returns the sum of `values` [n] over each of the `ids`, int64 [n]: [count], by default the
    largest id and 1, for which the host waits."""
    if count is None:
        count = int(ids.max()) + 1 if ids.numel() else 0
    return values.new_zeros(count).index_add(0, ids, values)


def denominator(by: NormaliseBy, step: Step) -> int:
    """Returns the divisor of the weighted sum over the whole step; at least 1."""
    if by == "token":
        return max(1, step.num_tokens)
    return max(1, step.num_sequences) * (1 if by == "sequence" else by)
