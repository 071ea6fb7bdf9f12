"""The memory that a micro-batch takes, estimated before a weight is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L
import torch

from lrl.training.activation_bytes import activation_bytes
from lrl.training.model import open_meta_model

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.policy import Policy

REMEDY = (
    "lower data.micro_batch_tokens, on which no result depends, or set model.gradient_checkpointing"
)


def micro_batch_bytes(trainer: L.Trainer, policy: Policy, data: RolloutDataModule) -> int:
    """Returns the bytes of activations and logits of a rank's largest micro-batch; 0 if they are
    not known: for a mixture of experts, and for layers that ranks divide."""
    if getattr(trainer.strategy, "tensor_parallel_size", 1) > 1:
        return 0
    network = open_meta_model(policy.policy_folder, policy.attention).train()
    if policy.lora is not None:
        policy.lora.add_to(network)
    network = network.to(getattr(torch, policy.training_dtype))
    of_a_token = activation_bytes(network, policy.gradient_checkpointing)
    if of_a_token is None:
        return 0
    responses = data.groups_per_step * data.sampling.n
    longest = responses * data.max_model_tokens
    tokens = min(data.micro_batch_tokens, longest)
    rows = network.get_output_embeddings().weight.shape[0]
    logits = min(policy.head_chunk_tokens, tokens) * rows * network.dtype.itemsize
    return int(tokens * of_a_token) + logits
