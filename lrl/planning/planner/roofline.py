"""Roofline costs from a model's shape and a data sheet: the longer of reading memory and of
computing.

One set of constants serves every model and device; none is fitted to a row of a table. A roofline
does not see costs of an implementation (kernels per layer, graph capture, quantised kernels): they
are in the constants, or missing.
"""

import math
from dataclasses import dataclass

from lrl.planning.planner import memory
from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.model_shape import BYTES, ModelShape

UPDATE_BYTES = 30
"""AdamW for one parameter: reads weight, gradient and two moments (16), writes weight and moments
(12) and a bfloat16 copy (2)."""
PASSES = 4
"""A micro-batch in forward passes: forward, forward again (recomputation), and backward, which is
two."""
MATMUL_SHARE = 0.55
"""Reached share of peak FLOP/s, in large matrix products. Llama 3 trained with 0.38 to 0.43 of peak
on 8,192 to 16,384 H100, exposed communication and pipeline bubbles included (2407.21783, table 4),
so products alone do better."""
BANDWIDTH_SHARE = 0.8
"""Reached share of a memory's bandwidth, when weights or keys and values are read. Our guess, between
the 0.9 that a plain copy reaches and what attention over many short sequences does; not measured
here."""
LINK_SHARE = 0.8
"""Reached share of a link's bandwidth, in large collectives; NCCL's own test prints 360 of 450 GB/s
for all-reduces within an H100 node, as we remember; not measured here."""
STEP_OVERHEAD_S = 3.0e-3
"""Seconds of a decode step without computing: scheduling, launch, sampling. The rest of the 8.4 ms of
one response by a 7B model on an H800 (StreamRL, figure 6, its first point) after reading the
weights."""
NODE_LATENCY_S = 10e-6
"""Seconds of a tiny all-reduce within a node. Our guess: the usual size; not measured here."""
NETWORK_LATENCY_S = 20e-6
"""Seconds that each doubling of the nodes adds to it. Our guess: the usual size; not measured
here."""


def all_reduce_s(size: float, cluster: Cluster, tp: int) -> float:
    """Returns the seconds of an all-reduce of `size` bytes over `tp` neighbours: latency, and two
    turns of a ring."""
    if tp == 1:
        return 0.0
    latency = NODE_LATENCY_S + NETWORK_LATENCY_S * math.log2(cluster.nodes_of(tp))
    return latency + 2 * size * (tp - 1) / tp / (cluster.link(tp) * LINK_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineGenerator:
    """One generator on `tp` devices (`GeneratorCosts`)."""

    shape: ModelShape
    cluster: Cluster
    tp: int = 1
    precision: str = "bf16"
    """Of weights and products; keys and values are bfloat16."""
    room: float | None = None
    """Bytes of each device that it may fill; None for all usable ones."""

    @property
    def kv_tokens(self) -> int:
        """See `GeneratorCosts.kv_tokens`; 0 if the weights do not fit."""
        room = memory.usable(self.cluster.device) if self.room is None else self.room
        return max(0, memory.generation(self.shape, self.tp, self.precision).tokens_in(room))

    def decode_s(self, responses: float, context_tokens: float) -> float:
        """See `GeneratorCosts.decode_s`. Weights and attention each take the longer of reading and
        computing; two all-reduces a layer and a step's overhead come on top."""
        if responses <= 0:
            return 0.0
        products = self._products_s(responses)
        reads = self._reads_s(
            context_tokens * self.shape.kv_bytes / min(self.tp, self.shape.kv_heads)
        )
        attention = max(reads, context_tokens * self.shape.attention_flops / self._flops("bf16"))
        return products + attention + self._all_reduces_s(responses) + STEP_OVERHEAD_S

    def prefill_s(self, tokens: float) -> float:
        """See `GeneratorCosts.prefill_s`. Without attention, which is small for prompts of a few
        thousand tokens."""
        if tokens <= 0:
            return 0.0
        return self._products_s(tokens) + self._all_reduces_s(tokens) + STEP_OVERHEAD_S

    def sync_pause_s(self) -> float:
        """See `GeneratorCosts.sync_pause_s`. Each device receives its own shard of the weights once
        (LlamaRL's DDMA); many generators are served along a tree (StreamRL, section on weight
        transfer), which costs no more."""
        shard = BYTES[self.precision] * self.shape.parameters / self.tp
        return shard / (self.cluster.outward * LINK_SHARE)

    def _products_s(self, tokens: float) -> float:
        weights = BYTES[self.precision] * self.shape.read_parameters(math.ceil(tokens)) / self.tp
        return max(
            self._reads_s(weights),
            tokens * self.shape.flops_per_token / self._flops(self.precision),
        )

    def _reads_s(self, size: float) -> float:
        return size / (self.cluster.device.bandwidth * BANDWIDTH_SHARE)

    def _flops(self, precision: str) -> float:
        """Returns the reached FLOP/s of all its devices together."""
        device = self.cluster.device
        peak = device.fp8_flops if precision == "fp8" else device.bf16_flops
        return self.tp * peak * MATMUL_SHARE

    def _all_reduces_s(self, tokens: float) -> float:
        size = BYTES["bf16"] * tokens * self.shape.hidden
        return 2 * self.shape.layers * all_reduce_s(size, self.cluster, self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineTrainer:
    """The trainer on `devices` devices (`TrainerCosts`): FSDP over groups of `tp` devices, with
    recomputation."""

    shape: ModelShape
    cluster: Cluster
    devices: int
    tp: int = 1
    shards: int | None = None
    """Devices over which the state is spread, a multiple of `tp`; None for all. Fewer make several
    copies."""

    @property
    def pause_overlaps(self) -> bool:
        """See `TrainerCosts.pause_overlaps`. Weights are sent from the devices without a copy."""
        return False

    def micro_batch_s(self, tokens: float, tokens_squared: float) -> float:
        """See `TrainerCosts.micro_batch_s`. The longer of computing and of FSDP's traffic, which
        overlaps with it (weights gathered for forward and backward, gradient scattered); tensor
        parallelism's all-reduces come on top: two a layer in each of forward, recomputation and
        backward."""
        attention = self.shape.attention_flops * tokens_squared / 2  # causal: half of the square
        flops = PASSES * (self.shape.flops_per_token * tokens + attention)
        computing = flops / (self.devices * self.cluster.device.bf16_flops * MATMUL_SHARE)
        size = BYTES["bf16"] * self.shape.hidden * tokens * self.tp / self.devices
        all_reduces = 6 * self.shape.layers * all_reduce_s(size, self.cluster, self.tp)
        return max(computing, 3 * self._over_group_s(self._shards // self.tp)) + all_reduces

    def update_s(self) -> float:
        """See `TrainerCosts.update_s`; with several copies of the state, the sum of their gradients
        included."""
        mine = self.shape.parameters / self._shards
        update = UPDATE_BYTES * mine / (self.cluster.device.bandwidth * BANDWIDTH_SHARE)
        copies = self.devices // self._shards
        if copies == 1:
            return update
        link = self.cluster.link(copies, stride=self._shards) * LINK_SHARE
        return update + 2 * BYTES["bf16"] * mine * (copies - 1) / copies / link

    def sync_s(self) -> float:
        """See `TrainerCosts.sync_s`. Every device sends its own share of the weights once, in
        bfloat16."""
        share = BYTES["bf16"] * self.shape.parameters / self._shards
        return share / (self.cluster.outward * LINK_SHARE)

    @property
    def _shards(self) -> int:
        return self.shards or self.devices

    def _over_group_s(self, members: int) -> float:
        """Returns the seconds to gather or scatter all layers once over the `members` that share
        every matrix."""
        if members == 1:
            return 0.0
        size = BYTES["bf16"] * self.shape.parameters / self.tp * (members - 1) / members
        return size / (self.cluster.link(members, stride=self.tp) * LINK_SHARE)
