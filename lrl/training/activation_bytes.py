"""The memory of activations: what a forward pass keeps for the backward pass, from a model's shapes
alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from lrl.errors import ConfigError
from lrl.training.model import decoder_of, trial_pass

_FEW, _MORE = 8, 16
"""Tokens of two trials; the difference leaves out what does not grow with them. They are few, so
the table of attention, tokens x tokens, is small: the meta device keeps it, and the kernels that
train do not."""


def activation_bytes(network: PreTrainedModel, gradient_checkpointing: bool) -> float | None:
    """Returns the bytes for each token of a micro-batch, padding included; without the logits.

    Args:
        network: The model on the meta device, in the dtype of its passes; only weights that are
            trained have `requires_grad`.
        gradient_checkpointing: Whether each layer keeps its input alone, and computes the rest
            again.

    Returns:
        None for a model that does not run without data, such as most mixtures of experts.
    """
    try:
        kept = (_kept(network, _MORE) - _kept(network, _FEW)) / (_MORE - _FEW)
    except ConfigError:
        return None
    if not gradient_checkpointing:
        return kept
    config = network.config.get_text_config()
    layers = config.num_hidden_layers
    inputs = layers * config.hidden_size * network.dtype.itemsize
    return float(inputs + kept / layers)


def _kept(network: PreTrainedModel, tokens: int) -> int:
    """Returns the bytes of all tensors but the weights that a forward pass keeps."""
    weights = {weight.untyped_storage()._cdata for weight in network.parameters()}
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    # With a mask of its own the model does not look for several sequences in the row, which needs
    # data.
    seen = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta")
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": seen, "use_cache": False}
    decoder = decoder_of(network)
    with trial_pass(network), saved_tensors_hooks(keep, lambda tensor: tensor):
        decoder(**arguments)
    storages = {tensor.untyped_storage()._cdata: tensor for tensor in found}
    return sum(
        tensor.untyped_storage().nbytes()
        for storage, tensor in storages.items()
        if storage not in weights
    )
