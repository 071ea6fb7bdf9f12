"""The gradient of an optimizer step: averaged over ranks, scaled, clipped, finite."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lrl.distributed.ranks import explain_rank_loss


def average_over_ranks(parameters: Iterable[torch.nn.Parameter], ranks: int) -> None:
    """Gives every rank the mean of all gradients, a rank without one counting as zero; a collective
    of all ranks.

    Sharded parameters are left out: the backward pass has averaged their gradients. Raises
    RuntimeError if another rank has ended.
    """
    if ranks == 1:
        return
    weights = [
        weight for weight in parameters if weight.requires_grad and not isinstance(weight, DTensor)
    ]
    here = [weight.grad is not None for weight in weights]
    anywhere = torch.tensor(here, dtype=torch.uint8, device=weights[0].device if weights else None)
    with explain_rank_loss("Another rank"):
        dist.all_reduce(anywhere, dist.ReduceOp.MAX)
    gradients = []
    for weight, any_rank_has_one in zip(weights, anywhere.tolist(), strict=True):
        if any_rank_has_one:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            gradients.append(weight.grad)
    with explain_rank_loss("Another rank"):
        for sum_of_ranks in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            sum_of_ranks.wait()
    for gradient in gradients:
        gradient.div_(ranks)


def scale_and_clip(
    parameters: Iterable[torch.nn.Parameter], scale: float, max_norm: float | None, step: int
) -> Tensor:
    """Multiplies gradients by `scale`, then limits their L2 norm over all parameters to `max_norm`.

    Returns the norm before it was limited, float32 []. Raises RuntimeError if it is not finite.
    """
    weights = [parameter for parameter in parameters if parameter.grad is not None]
    for weight in weights:
        assert weight.grad is not None
        weight.grad.mul_(scale)
    norm = norm_of(weight.grad for weight in weights)
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    if not torch.isfinite(norm):
        raise RuntimeError(
            f"step {step}: the gradient norm is {norm.item()}. The weights were not touched. Look "
            "at policy/ratio_max and policy/kl_behaviour of the steps before, then lower model.lr "
            "or model.max_grad_norm, or set model.dtype to float32."
        )
    return norm


def norm_of(gradients: Iterable[Tensor | None]) -> Tensor:
    """Returns the L2 norm over all gradients, float32 []; a collective of all ranks if they are
    sharded."""
    by_mesh: dict[Any, list[Tensor]] = {}  # torch adds up no tensors of different meshes
    for gradient in gradients:
        if gradient is not None:
            by_mesh.setdefault(
                gradient.device_mesh if isinstance(gradient, DTensor) else None, []
            ).append(gradient)
    norms = [torch.nn.utils.get_total_norm(some) for some in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.stack(whole).norm() if whole else torch.tensor(0.0)
