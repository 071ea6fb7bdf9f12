"""Memory of one device in training and in generation, W + a b as in LlamaRL's problems
(`llamarl_bounds.py`).

All in decimal bytes. W does not depend on the batch, a is the bytes of each token in it.
"""

from dataclasses import dataclass

from lrl.planning.planner.devices import GB, Device
from lrl.planning.planner.model_shape import BYTES, ModelShape

RESERVE = 4 * GB
"""CUDA's context, NCCL's buffers, CUDA graphs and the allocator's loss. As benchmarks/gpu plans for
one process; not measured."""
STATE_BYTES = 16
"""A trained parameter: float32 weight 4, gradient 4 and AdamW's two moments 8, as lrl keeps them.
With bfloat16 weights and gradients besides a float32 copy it is 2 + 2 + 12, the same (ZeRO,
1910.02054, section 3.1)."""
HEAD_CHUNK_TOKENS = 1024
"""Tokens with their logits in memory at once (`model.head_chunk_tokens`)."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Bytes of a device: `fixed + per_token * tokens`."""

    fixed: float
    """W: bytes of an empty batch."""
    per_token: float
    """a: bytes of every token of the batch."""

    def bytes_for(self, tokens: float) -> float:
        """Returns the bytes with `tokens` tokens in the batch."""
        return self.fixed + self.per_token * tokens

    def tokens_in(self, room: float) -> int:
        """Returns the tokens that fit into `room` bytes; below 0 if not even W fits."""
        return int((room - self.fixed) // self.per_token)


def usable(device: Device) -> float:
    """Returns the bytes of a device that plans may fill."""
    return device.memory - RESERVE


def training(shape: ModelShape, shards: int, tp: int) -> Taken:
    """Returns training's memory on a device, by the tokens of its micro-batch.

    W: 16 bytes of each parameter, spread over `shards` devices (FSDP and tensor parallelism
    together); the current layer, the prefetched one and the ends of the network, gathered in
    bfloat16 over the FSDP group but still split by tensor parallelism; the logits of one chunk with
    their softmax and gradient in float32.

    a: with recomputation only a layer's input is kept for the backward pass, 2 bytes a number; one
    layer at a time has its inner values and their gradients (about 10 widths and 4 feed-forward
    widths, for every expert of a token). Sequence parallelism splits these, too, by tensor
    parallelism.
    """
    states = STATE_BYTES * shape.parameters / shards
    ends = shape.embedding_parameters * (1 if shape.tied else 2)
    gathered = BYTES["bf16"] * (2 * shape.layer_parameters + ends) / tp if shards > tp else 0.0
    logits = 3 * 4 * HEAD_CHUNK_TOKENS * shape.vocabulary / tp
    kept = BYTES["bf16"] * shape.layers * shape.hidden
    at_work = 2 * BYTES["bf16"] * (10 * shape.hidden + 4 * shape.ffn * shape.experts_per_token)
    return Taken(fixed=states + gathered + logits, per_token=(kept + at_work) / tp)


def generation(shape: ModelShape, tp: int, precision: str) -> Taken:
    """Returns a generator's memory on each of its devices, by the tokens in its KV cache.

    W: the weights in `precision`, split over `tp` devices. a: keys and values in bfloat16, split by
    heads: with more devices than key-value heads, every head is held more than once.
    """
    return Taken(
        fixed=BYTES[precision] * shape.parameters / tp,
        per_token=shape.kv_bytes / min(tp, shape.kv_heads),
    )
