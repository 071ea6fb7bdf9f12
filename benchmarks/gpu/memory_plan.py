"""The memory of a run on one GPU, added up before anything is allocated.

Weights, gradients and AdamW's moments are bfloat16. That loses small updates, which matters to
learning and not to speed. In float32 these alone would take 128 GB with the 8 B policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

from benchmarks.random_policy import num_parameters

GIB = 2**30
GROUPS_PER_STEP, ROLLOUTS_PER_GROUP = 16, 8
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 512, 512
CONCURRENT_RESPONSES = GROUPS_PER_STEP * ROLLOUTS_PER_GROUP
MICRO_BATCH_TOKENS, HEAD_CHUNK_TOKENS = 8192, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the GPU, by purpose."""

    weights: int
    """The policy's. Gradients, both of AdamW's moments and its working space take four times as
    much again."""
    activations: int
    """Of one micro-batch with gradient checkpointing, the head's logits among them."""
    kv_cache: int
    """Space for every response at full length, so that vLLM never has to preempt one."""
    staging: int = 2 * GIB
    """Buffers of the transport, on each side."""
    context: int = 2 * GIB
    """CUDA's own and the allocator's loss, on each side; in the generator also activations and CUDA
    graphs."""

    @property
    def trainer(self) -> int:
        return 5 * self.weights + self.activations + self.staging + self.context

    @property
    def generator(self) -> int:
        return self.weights + self.kv_cache + self.staging + 2 * self.context

    def utilization(self, total: int) -> float:
        """vLLM's `gpu_memory_utilization` on a GPU with `total` bytes.

        Raises:
            ValueError: Trainer and generator do not fit; 3 % are left free.
        """
        if self.trainer + self.generator > 0.97 * total:
            raise ValueError(
                f"the trainer takes about {self.trainer / GIB:.0f} GiB, the generator "
                f"{self.generator / GIB:.0f} GiB, and the GPU has {total / GIB:.0f} GiB. Take a "
                "larger GPU or a smaller --size."
            )
        return round(self.generator / total, 3)


def plan_memory(config: LlamaConfig) -> MemoryPlan:
    """Returns the memory of a run with a policy of this shape, all of it in bfloat16 but the
    logits."""
    layers = config.num_hidden_layers
    hidden = config.hidden_size
    head_dim = config.head_dim
    checkpoints = MICRO_BATCH_TOKENS * layers * hidden * 2
    # Forward and backward.
    one_layer = MICRO_BATCH_TOKENS * (10 * hidden + 4 * config.intermediate_size) * 2 * 2
    # logits, their log-softmax, their gradient.
    head = HEAD_CHUNK_TOKENS * config.vocab_size * 4 * 3
    kv_per_token = 2 * layers * config.num_key_value_heads * head_dim * 2
    return MemoryPlan(
        weights=2 * num_parameters(config),
        activations=checkpoints + one_layer + head,
        kv_cache=CONCURRENT_RESPONSES * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS) * kv_per_token,
    )
