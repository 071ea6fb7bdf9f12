"""Fused kernels: norms, rotary embedding, activation and residuals of a layer in few passes over
memory, and the head's log-probs in one.

They differ from the layers' own by rounding, and may fail only where they first run. So both are
tried before a server starts: log-probs and the gradient of the first layer, as a step computes
them.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from transformers import PreTrainedModel

from lrl.errors import ConfigError
from lrl.system.ranks import Ranks
from lrl.training.logprobs import FUSED_HEAD
from lrl.training.sharding import layers_of, own_part
from lrl.training.trials import Result, gap, rounding_gap, shortened

log = logging.getLogger(__name__)

Kernels = Literal["auto", "liger", "compile", "eager"]
VARIANTS = 64
"""Compilations of one kind of layer before torch leaves it unfused, by default 8: one row or
several, with masks, gradients and adapters or without, of policy, critic and reference."""


def fuse_tried(
    network: PreTrainedModel,
    kernels: Kernels,
    device: torch.device,
    ranks: Ranks,
    passes: Callable[[], Tensor],
    in_16_bits: bool,
) -> Kernels:
    """Gives the policy's network these kernels if they work, and returns which it has; a collective.
    `passes` runs the same text forward and back, and returns its log-probs, float32 [n]. Raises
    ConfigError if kernels that `kernels` names do not work."""
    wanted: Kernels = "liger" if kernels == "auto" else kernels
    shared = sys.modules[type(network).__module__]  # Liger's rotary embedding goes in there
    own = [(vars(each), dict(vars(each))) for each in (shared, *network.modules())]
    reasons = ranks.share(ranks.gather(_unable(wanted, network, device)))
    if not any(reasons):
        reasons = ranks.share(ranks.gather(_fails(wanted, network, passes, in_16_bits)))
    why = next(filter(None, reasons), "")
    if not why:
        return wanted
    if kernels != "auto":
        raise ConfigError(f"model.kernels is {kernels!r}, and {why}. Leave it out.")
    for attributes, before in own:
        attributes.clear()
        attributes.update(before)
    rank_zero_only(log.info)("model.kernels: the layers stay as they are, because %s.", why)
    return "eager"


def fuse(network: PreTrainedModel, kernels: Kernels) -> None:
    """Gives the kernels to a network; all of one class share Liger's rotary embedding. A family that
    Liger does not know keeps its own."""
    if kernels == "eager":
        return
    setattr(network, FUSED_HEAD, True)
    if kernels == "compile":
        torch._dynamo.config.recompile_limit = VARIANTS
        for layer in layers_of(network):
            # All layers share a compilation. Hooks, checkpointing and FSDP stay outside of it.
            layer.forward = torch.compile(layer.forward, dynamic=True)
    elif _liger_knows(network):
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        # It exchanges forward functions of this network and names in the module of its class.
        no_losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        _apply_liger_kernel_to_instance(network, **no_losses)


def _unable(kernels: Kernels, network: PreTrainedModel, device: torch.device) -> str:
    """Returns why the network cannot have the kernels; nothing if it may."""
    kind = type(network).__name__
    if kernels == "compile":
        return "" if any(layers_of(network)) else f"{kind} does not say what its layers are"
    if device.type != "cuda":
        return f"Liger's kernels need a CUDA GPU, and the policy trains on {device.type}"
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install lrl[liger])"
    return "" if _liger_knows(network) else f"Liger has no kernels for {kind}"


def _fails(
    kernels: Kernels, network: PreTrainedModel, passes: Callable[[], Tensor], in_16_bits: bool
) -> str:
    """Gives the network the kernels; returns why it must not keep them, nothing if they work."""
    compute = partial(_result, network, passes)
    truth = compute()
    limit = rounding_gap(network, compute, truth, in_16_bits)
    kind = type(network).__name__
    try:
        fuse(network, kernels)
        found = gap(compute(), truth)
    except Exception as error:  # those of Triton and of torch's compiler have no base in common
        return f"{kernels} fails on {kind} ({shortened(error)})"
    if found <= limit:
        return ""
    return f"{kernels} gives {kind} other numbers than eager (they differ by {found:.1g})"


def _result(network: PreTrainedModel, passes: Callable[[], Tensor]) -> Result:
    with torch.enable_grad():
        logprobs = passes()
    first = next(layers_of(network), network)
    grads = [own_part(one.grad) for one in first.parameters() if one.grad is not None]
    gradient = torch.cat([logprobs.new_zeros(1), *(one.flatten().float() for one in grads)])
    network.zero_grad()
    return logprobs, gradient


def _liger_knows(network: PreTrainedModel) -> bool:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return network.config.model_type in MODEL_TYPE_TO_APPLY_LIGER_FN
