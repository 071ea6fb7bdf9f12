"""From the gradient of a sum to the one the optimizer may use: scaled to a mean, clipped, and known to be finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def scale_and_clip(parameters: Iterable[torch.nn.Parameter], scale: float, max_norm: float | None, step: int) -> Tensor:
    """Multiplies gradients by `scale`, then limits their L2 norm over all parameters to `max_norm`.

    Returns:
        float32 [], the norm before it was limited.

    Raises:
        RuntimeError: The norm is not finite.
    """
    weights = [parameter for parameter in parameters if parameter.grad is not None]
    for weight in weights:
        assert weight.grad is not None
        weight.grad.mul_(scale)
    norm = torch.nn.utils.clip_grad_norm_(weights, math.inf if max_norm is None else max_norm)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"step {step}: the gradient norm is {norm.item()}. The weights were not touched. Look at policy/ratio_max "
            "and policy/kl_behaviour of the steps before, then lower model.lr or model.max_grad_norm, or set "
            "model.dtype to float32."
        )
    return norm
