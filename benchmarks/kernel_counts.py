"""Counts the kernels of one Llama layer, forward and backward, as transformers has it and compiled.

    python -m benchmarks.kernel_counts

Counted on the CPU, where inductor generates C++: its kernels are the outermost loops. On a GPU it
fuses differently.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from benchmarks import records

LIBRARY = ("mm", "attention")
"""Parts of the names of operators that inductor calls as they are."""
OUTERMOST_LOOP = "\n        for("


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
    sizes = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(sizes, layer_idx=0)
    hidden = torch.randn(1, 24, sizes.hidden_size, requires_grad=True)
    rotary = LlamaRotaryEmbedding(sizes)(hidden, torch.arange(24)[None])
    upstream = torch.randn(1, 24, sizes.hidden_size)

    def passes(layer: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found: Tensor = layer(hidden, position_embeddings=rotary)
        found.backward(upstream)

    with Counted() as counted:
        passes(layer)
    with config.patch({"cpp.threads": 1}):  # no indentation for threads
        _, sources = run_and_get_code(lambda: passes(torch.compile(layer)))
    generated = sum(source.count(OUTERMOST_LOOP) for source in sources)
    library = sum(
        times for name, times in counted.operators.items() if any(part in name for part in LIBRARY)
    )
    return sum(counted.operators.values()), generated + library


def main() -> None:
    rows = [("float32", *counts(bf16=False)), ("bfloat16 autocast", *counts(bf16=True))]
    print(records.markdown(("one Llama layer, forward and backward", "eager", "compiled"), rows))


if __name__ == "__main__":
    main()
