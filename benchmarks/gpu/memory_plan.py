"""The memory of a run on one GPU, added up before anything is allocated.

Weights, gradients and AdamW's moments are bfloat16. In float32 these alone would take 128 GB with
the 8 B policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

from lrl.planning.model_shape import read_shape
from lrl.planning.roofline import Held, training_memory

GIB = 2**30
GROUPS_PER_STEP, ROLLOUTS_PER_GROUP = 16, 8
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 512, 512
CONCURRENT_RESPONSES = GROUPS_PER_STEP * ROLLOUTS_PER_GROUP
MICRO_BATCH_TOKENS, HEAD_CHUNK_TOKENS = 8192, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the GPU, by purpose."""

    weights: int
    """The policy's."""
    training: int
    """Weights, gradients, both of AdamW's moments, and the activations of one micro-batch with
    gradient checkpointing, the head's logits among them."""
    kv_cache: int
    """Space for every response at full length, so that vLLM never has to preempt one."""
    staging: int = 2 * GIB
    """Buffers of the transport, on each side."""
    context: int = 2 * GIB
    """CUDA's own and the allocator's loss, on each side; in the generator also activations and CUDA
    graphs."""

    @property
    def trainer(self) -> int:
        return self.training + self.staging + self.context

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
    shape = read_shape(config.to_dict())
    memory = training_memory(shape, shards=1, tp=1, held=Held(dtype="bfloat16"))
    tokens = CONCURRENT_RESPONSES * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS)
    return MemoryPlan(
        weights=2 * shape.parameters,
        training=int(memory.bytes_for(MICRO_BATCH_TOKENS)),
        kv_cache=tokens * shape.kv_bytes,
    )
