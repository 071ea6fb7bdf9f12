"""Counts the kernels of one Llama layer, forward and backward, as transformers has it and compiled.

    python -m benchmarks.kernel_counts

Counted on the CPU, where inductor generates C++: on a GPU it fuses differently.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._inductor import metrics
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks import records

LIBRARY = ("mm", "attention")
"""Parts of the names of operators that inductor calls as they are."""


class Counted(TorchDispatchMode):
    """Counts the operators that compute: no views, no empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = operator(*args, **(kwargs or {}))
        is_new = not operator.is_view and "empty" not in operator.__name__
        if is_new and operator.__name__ not in ("detach.default", "_unsafe_view.default"):
            self.operators[operator.__name__] += 1
        return found


def counts(bf16: bool) -> tuple[int, int]:
    """Returns the kernels of an eager and of a compiled layer."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(config, layer_idx=0)
    hidden = torch.randn(1, 24, config.hidden_size, requires_grad=True)
    rotary = LlamaRotaryEmbedding(config)(hidden, torch.arange(24)[None])
    upstream = torch.randn(1, 24, config.hidden_size)

    def passes(layer: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found: Tensor = layer(hidden, position_embeddings=rotary)
        found.backward(upstream)

    with Counted() as counted:
        passes(layer)
    metrics.reset()
    passes(torch.compile(layer))
    library = sum(
        times for name, times in counted.operators.items() if any(part in name for part in LIBRARY)
    )
    return sum(counted.operators.values()), metrics.generated_kernel_count + library


def main() -> None:
    rows = [("float32", *counts(bf16=False)), ("bfloat16 autocast", *counts(bf16=True))]
    print(records.markdown(("one Llama layer, forward and backward", "eager", "compiled"), rows))


if __name__ == "__main__":
    main()
