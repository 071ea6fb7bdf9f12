"""Data sheets of accelerators, clusters of them, and a cost model of a model's shape on both: memory
on each device, and seconds as the longer of reading memory and of computing.

Sheets have the makers' peaks, dense and in one direction, in gigabytes of 10^9 bytes. One set of
constants serves every model and device; none is fitted to a row of a table. What an implementation
costs beyond a roofline (kernels per layer, graph capture) is in the constants, or missing.
"""

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from lrl.planning.model_shape import BF16_BYTES, ModelShape

GB, TB, TFLOPS = 1e9, 1e12, 1e12
DEVICES_PER_NODE = 8
RESERVE = 4 * GB
"""CUDA's context, NCCL's buffers, CUDA graphs and the allocator's loss; not measured."""
STATES = 4
"""Numbers of a trained parameter: weight, gradient and AdamW's two moments."""
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2}
"""Of a number by `model.dtype`."""
INNER_WIDTHS, INNER_KEY_WIDTHS = 19, 5
"""Widths of the residual stream, and of the keys, that a layer keeps in bfloat16 for its backward
pass, as Qwen3 under autocast, which keeps the most (counted in transformers 5.19)."""
HEAD_CHUNK_TOKENS = 1024
"""Tokens with their logits in memory at once (`model.head_chunk_tokens`)."""
UPDATE_BYTES = 30
"""AdamW for one parameter: reads 16 bytes, writes 12 and a bfloat16 copy (2)."""
PASSES = 3
"""A micro-batch in forward passes: forward, and backward, which is two."""
MATMUL_SHARE = 0.55
"""Reached share of peak FLOP/s in large matrix products. Llama 3 trained with 0.38 to 0.43,
communication and pipeline bubbles included (2407.21783, table 4)."""
BANDWIDTH_SHARE = 0.8
"""Reached share of a memory's bandwidth: a guess; a plain copy has 0.9."""
LINK_SHARE = 0.8
"""Reached share of a link's bandwidth in large collectives; not measured here."""
STEP_OVERHEAD_S = 3.0e-3
"""Seconds of a decode step besides reading the weights: StreamRL's figure 6, its first point."""
NODE_LATENCY_S = 10e-6
"""Seconds of a tiny all-reduce within a node: a guess."""


class Device(NamedTuple):
    """One accelerator, in FLOP/s of dense products, bytes and bytes/s."""

    name: str
    bf16_flops: float
    memory: float
    bandwidth: float
    node_link: float
    """Sent within its node, while it receives as many (half of a sheet's figure)."""
    network: float
    """Sent to other nodes; a property of the node it is sold in."""


_SHEETS = (
    # NVIDIA H100 data sheet, SXM; network: DGX H100, 400 Gb/s a device
    ("H100", 989.4 * TFLOPS, 80 * GB, 3.35 * TB, 450 * GB, 50 * GB),
    # NVIDIA H200 data sheet, SXM; network: DGX H200, 400 Gb/s a device
    ("H200", 989.4 * TFLOPS, 141 * GB, 4.8 * TB, 450 * GB, 50 * GB),
    # StreamRL (2504.15930), table 1, network 8 x 200 Gb/s a node
    ("H800", 989.5 * TFLOPS, 80 * GB, 3.35 * TB, 200 * GB, 25 * GB),
    # StreamRL (2504.15930), table 1; network as in H100's node: a guess
    ("H20", 148 * TFLOPS, 96 * GB, 4.0 * TB, 450 * GB, 50 * GB),
    # NVIDIA A100 80GB data sheet, SXM; network: DGX A100, 200 Gb/s a device
    ("A100-80GB", 312 * TFLOPS, 80 * GB, 2.039 * TB, 300 * GB, 25 * GB),
    # NVIDIA A100 40GB data sheet, SXM; network as in the DGX A100
    ("A100-40GB", 312 * TFLOPS, 40 * GB, 1.555 * TB, 300 * GB, 25 * GB),
    # NVIDIA DGX B200 data sheet, an eighth of it and half of its figures with sparsity
    ("B200", 2250 * TFLOPS, 180 * GB, 8.0 * TB, 900 * GB, 50 * GB),
    # NVIDIA Ada architecture whitepaper, products added up in float32; link: PCIe 4.0; network: a guess
    ("RTX4090", 165.2 * TFLOPS, 24 * GB, 1.008 * TB, 32 * GB, 12.5 * GB),
)
SHEETS = tuple(map(Device._make, _SHEETS))
KNOWN = {device.name.lower(): device for device in SHEETS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind, in nodes."""

    device: Device
    count: int
    devices_per_node: int = DEVICES_PER_NODE

    def __str__(self) -> str:
        return f"{self.count}x{self.device.name}"

    def nodes_of(self, devices: int) -> int:
        """Returns the nodes that `devices` devices fill."""
        return -(-devices // self.devices_per_node)

    @property
    def outward(self) -> float:
        """Bytes/s between devices of two groups, for example from the trainer to a generator."""
        return self.device.node_link if self.nodes_of(self.count) == 1 else self.device.network

    def link(self, members: int, stride: int = 1) -> float:
        """Returns the bytes/s of each of `members` devices in a collective; every `stride`-th
        device takes part.

        Across nodes a ring enters a node through the network ports of all members in it.
        """
        together = max(1, self.devices_per_node // stride)
        if members <= together:
            return self.device.node_link
        return min(self.device.node_link, together * self.device.network)


def parse_cluster(text: str, devices_per_node: int = DEVICES_PER_NODE) -> Cluster:
    """Returns the cluster that a text like `8xH100` (number, `x`, name of a sheet) names; raises
    ValueError for another form, a number below 1, or a name without a sheet."""
    match = re.fullmatch(r"([1-9]\d*)x(\S+)", text.lower())
    if match is None or match[2] not in KNOWN:
        names = ", ".join(device.name for device in SHEETS)
        raise ValueError(f"--cluster is {text!r}; give a number and one of {names}, like 8xH100.")
    return Cluster(device=KNOWN[match[2]], count=int(match[1]), devices_per_node=devices_per_node)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device: `fixed + per_token * tokens` of its batch."""

    fixed: float
    per_token: float

    def bytes_for(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens

    def tokens_in(self, room: float) -> int:
        """Returns the tokens that fit into `room` bytes; below 0 if not even `fixed` fits."""
        return int((room - self.fixed) // self.per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Settings of the policy that decide the trainer's memory."""

    dtype: str = "float32"
    """As `model.dtype`. A float32 policy computes in bfloat16, with a copy of the weights at work."""
    recompute_every: int = 1
    """As the number in `model.gradient_checkpointing`; 0 recomputes no layer."""
    lora_rank: int = 0
    """0 trains all weights."""

    def recomputed(self, shape: ModelShape) -> int:
        """Returns the layers that are computed again in the backward pass."""
        return -(-shape.layers // self.recompute_every) if self.recompute_every else 0

    def state_bytes(self, shape: ModelShape) -> int:
        """Returns the bytes of weights, gradients and moments; of adapters these are float32."""
        of_number = WEIGHT_BYTES[self.dtype]
        if not self.lora_rank:
            return STATES * of_number * shape.parameters
        adapters = shape.adapter_parameters(self.lora_rank)
        return of_number * shape.parameters + STATES * WEIGHT_BYTES["float32"] * adapters


def usable(device: Device) -> float:
    """Returns the bytes of a device that plans may fill."""
    return device.memory - RESERVE


def training_memory(shape: ModelShape, shards: int, tp: int, held: Held = Held()) -> Memory:
    """Returns training's memory on a device, by the tokens of its micro-batch.

    Fixed: the state, spread over `shards` devices; the bfloat16 weights at work (FSDP's: two layers
    and the ends of the network; autocast's copies: of every layer that is not recomputed); one
    chunk's logits, softmax and gradient in float32. Each token: every layer's input, the inner
    values of layers that are not recomputed, and of one layer those and their gradients (about 10
    widths and 4 feed-forward widths for each of its experts).
    """
    kept_whole = shape.layers - held.recomputed(shape)
    at_work = 0
    if shards > tp:
        ends = shape.embedding_parameters * (1 if shape.tied else 2)
        at_work = 2 * shape.layer_parameters + ends
    elif held.dtype == "float32":
        at_work = (kept_whole + 1) * shape.layer_parameters + shape.embedding_parameters
    logits = 3 * 4 * HEAD_CHUNK_TOKENS * shape.vocabulary
    wide = shape.ffn * shape.experts_per_token
    inputs = shape.layers * shape.hidden
    inner = INNER_WIDTHS * max(shape.hidden, shape.heads * shape.head_dim) + 4 * wide
    inner += INNER_KEY_WIDTHS * shape.kv_heads * shape.head_dim
    one_layer = 2 * (10 * shape.hidden + 4 * wide)
    return Memory(
        fixed=held.state_bytes(shape) / shards + (BF16_BYTES * at_work + logits) / tp,
        per_token=BF16_BYTES * (inputs + kept_whole * inner + one_layer) / tp,
    )


def all_reduce_s(size: float, device: Device, tp: int) -> float:
    """Returns the seconds of an all-reduce over `tp` devices of a node: latency and a ring."""
    if tp == 1:
        return 0.0
    return NODE_LATENCY_S + 2 * size * (tp - 1) / tp / (device.node_link * LINK_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineGenerator:
    """One generator on `tp` devices, in bfloat16."""

    shape: ModelShape
    cluster: Cluster
    tp: int = 1

    @property
    def memory(self) -> Memory:
        """Of each of its devices, by the tokens in its KV cache. With more devices than key-value
        heads, each head is held more than once."""
        return Memory(
            fixed=BF16_BYTES * self.shape.parameters / self.tp,
            per_token=self.shape.kv_bytes / min(self.tp, self.shape.kv_heads),
        )

    @property
    def kv_tokens(self) -> int:
        return max(0, self.memory.tokens_in(usable(self.cluster.device)))

    def decode_s(self, responses: float, context_tokens: float) -> float:
        """Weights and attention each take the longer of reading and computing."""
        if responses <= 0:
            return 0.0
        reads = self._reads_s(context_tokens * self.memory.per_token)
        attention = max(reads, context_tokens * self.shape.attention_flops / self._flops)
        return self._pass_s(responses) + attention

    def prefill_s(self, tokens: float) -> float:
        """Without attention, which is small for prompts of a few thousand tokens."""
        return self._pass_s(tokens) if tokens > 0 else 0.0

    @property
    def sync_pause_s(self) -> float:
        """Each device receives its own shard of the weights once (LlamaRL's DDMA)."""
        shard = BF16_BYTES * self.shape.parameters / self.tp
        return shard / (self.cluster.outward * LINK_SHARE)

    def _pass_s(self, tokens: float) -> float:
        """Returns the seconds of one pass over `tokens` tokens without attention."""
        weights = BF16_BYTES * self.shape.read_parameters(math.ceil(tokens)) / self.tp
        computing = tokens * self.shape.flops_per_token / self._flops
        size = BF16_BYTES * tokens * self.shape.hidden
        all_reduces = 2 * self.shape.layers * all_reduce_s(size, self.cluster.device, self.tp)
        return max(self._reads_s(weights), computing) + all_reduces + STEP_OVERHEAD_S

    def _reads_s(self, size: float) -> float:
        return size / (self.cluster.device.bandwidth * BANDWIDTH_SHARE)

    @property
    def _flops(self) -> float:
        return self.tp * self.cluster.device.bf16_flops * MATMUL_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineTrainer:
    """The trainer on `devices` devices: FSDP over groups of `tp`."""

    shape: ModelShape
    cluster: Cluster
    devices: int
    shards: int
    """Devices with a part of the state, a multiple of `tp`; fewer than all make copies."""
    tp: int = 1
    held: Held = Held()
    pause_overlaps = False
    """Weights are sent from the devices without a copy."""

    def micro_batch_s(self, tokens: float, tokens_squared: float) -> float:
        """The longer of computing and of FSDP's traffic (weights gathered twice, gradient scattered);
        tensor parallelism's all-reduces come on top, two a layer in each pass."""
        again = self.held.recomputed(self.shape) / self.shape.layers
        attention = self.shape.attention_flops * tokens_squared / 2  # causal: half of the square
        flops = (PASSES + again) * (self.shape.flops_per_token * tokens + attention)
        computing = flops / (self.devices * self.cluster.device.bf16_flops * MATMUL_SHARE)
        size = BF16_BYTES * self.shape.hidden * tokens * self.tp / self.devices
        all_reduces = (
            (4 + 2 * again) * self.shape.layers * all_reduce_s(size, self.cluster.device, self.tp)
        )
        traffic = 0.0
        if (members := self.shards // self.tp) > 1:
            part = BF16_BYTES * self.shape.parameters / self.tp * (members - 1) / members
            traffic = 3 * part / (self.cluster.link(members, stride=self.tp) * LINK_SHARE)
        return max(computing, traffic) + all_reduces

    @property
    def update_s(self) -> float:
        """With several copies of the state, the sum of their gradients included."""
        mine = self.shape.parameters / self.shards
        update = UPDATE_BYTES * mine / (self.cluster.device.bandwidth * BANDWIDTH_SHARE)
        copies = self.devices // self.shards
        if copies == 1:
            return update
        link = self.cluster.link(copies, stride=self.shards) * LINK_SHARE
        return update + 2 * BF16_BYTES * mine * (copies - 1) / copies / link

    @property
    def sync_s(self) -> float:
        """Every device sends its own share of the weights once, in bfloat16."""
        share = BF16_BYTES * self.shape.parameters / self.shards
        return share / (self.cluster.outward * LINK_SHARE)
