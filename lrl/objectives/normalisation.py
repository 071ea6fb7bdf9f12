"""What the losses of a step are divided by.

Every way is a weight per token, known when its micro-batch is, and one number for the whole step, known when the step
ends. So the gradient does not depend on how the step was packed.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lrl.runtime.config_errors import fault
from lrl.types import Step

NormaliseBy = Literal["token", "sequence"] | int
"""`token`: by all trained tokens of the step, each counts alike (DAPO, 2503.14476, section 3.3). `sequence`: by an
response's own tokens, then by the number of responses, each response counts alike (GRPO, 2402.03300, equation 3). A
number: by that number of tokens and by the number of responses; with the longest length allowed it is Dr. GRPO
(2503.20783)."""


def check(by: NormaliseBy) -> NormaliseBy:
    """`by` itself; a fault if nothing can be divided by it."""
    if by not in ("token", "sequence") and not (isinstance(by, int) and by > 0):
        fault(f"model.normalise_by is {by!r}: use token, sequence, or a number of tokens above 0.")
    return by


def token_weights(by: NormaliseBy, responses: Tensor) -> Tensor:
    """float32 [n]: factor of each token's loss; `responses` int64 [n] tells which answer it belongs to."""
    ones = torch.ones(responses.shape, device=responses.device)
    if by != "sequence" or not responses.numel():
        return ones
    lengths = ones.new_zeros(int(responses.max()) + 1).index_add(0, responses, ones)
    return 1 / lengths[responses]


def denominator(by: NormaliseBy, step: Step) -> int:
    """What the weighted sum over the whole step is divided by; at least 1."""
    if by == "token":
        return max(1, step.num_tokens)
    return max(1, step.num_sequences) * (1 if by == "sequence" else by)
