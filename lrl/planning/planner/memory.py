"""Bytes on a device: what training and generation hold, as LlamaRL's problems need it (W + a b, `problems.py`).

All in decimal bytes, and for one device. W is what is there whatever the batch, a what each further token takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from lrl.planning.planner.devices import GB, Device
from lrl.planning.planner.model_shape import BYTES, ModelShape

RESERVE = 4 * GB
"""CUDA's context, NCCL's buffers, CUDA graphs and the allocator's loss. As benchmarks/gpu plans for one process; not
measured."""
STATE_BYTES = 16
"""A trained parameter: float32 weight 4, gradient 4 and AdamW's two moments 8, as lrl keeps them. With bfloat16 weights
and gradients beside a float32 copy it is 2 + 2 + 12, the same (ZeRO, 1910.02054, section 3.1)."""
HEAD_CHUNK_TOKENS = 1024
"""Tokens whose logits are in memory at once (`model.head_chunk_tokens`)."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one side takes of a device: `fixed + per_token * tokens` bytes."""

    fixed: float
    """W: bytes that are there whatever the batch."""
    per_token: float
    """a: bytes for every token of the batch."""

    def bytes_for(self, tokens: float) -> float:
        """Bytes with `tokens` tokens in the batch."""
        return self.fixed + self.per_token * tokens

    def tokens_in(self, room: float) -> int:
        """Tokens for which `room` bytes suffice; below 0 if not even W fits."""
        return int((room - self.fixed) // self.per_token)


def usable(device: Device) -> float:
    """Bytes of a device that plans may fill."""
    return device.memory - RESERVE


def training(shape: ModelShape, shards: int, tp: int) -> Taken:
    """What training takes of a device, by the tokens that it has in a micro-batch.

    W: 16 bytes of each parameter, spread over `shards` devices (FSDP and tensor parallelism together); one layer at
    work and one fetched ahead, and the ends of the network, gathered in bfloat16 over the FSDP group but still cut by
    tensor parallelism; the logits of one chunk with their softmax and gradient in float32.

    a: with recomputation only a layer's input is kept for the backward pass, 2 bytes a number; one layer at a time has
    its inner values and their gradients (about 10 widths and 4 feed-forward widths, for every expert a token meets).
    Sequence parallelism cuts these, too, by tensor parallelism.
    """
    states = STATE_BYTES * shape.parameters / shards
    ends = shape.embedding_parameters * (1 if shape.tied else 2)
    gathered = BYTES["bf16"] * (2 * shape.layer_parameters + ends) / tp if shards > tp else 0.0
    logits = 3 * 4 * HEAD_CHUNK_TOKENS * shape.vocabulary / tp
    kept = BYTES["bf16"] * shape.layers * shape.hidden
    at_work = 2 * BYTES["bf16"] * (10 * shape.hidden + 4 * shape.ffn * shape.experts_per_token)
    return Taken(fixed=states + gathered + logits, per_token=(kept + at_work) / tp)


def generation(shape: ModelShape, tp: int, precision: str) -> Taken:
    """What a generator takes of each of its devices, by the tokens whose keys and values it holds.

    W: the weights in `precision`, cut over `tp` devices. a: keys and values in bfloat16, cut by heads: with more
    devices than key-value heads, every head is held more than once.
    """
    return Taken(
        fixed=BYTES[precision] * shape.parameters / tp,
        per_token=shape.kv_bytes / min(tp, shape.kv_heads),
    )
