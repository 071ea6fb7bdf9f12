"""The package flash-attn, which needs a compiler, as far as transformers calls it: its functions
with torch's own flash kernel behind them.

    install(folder)     before transformers is imported
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VERSION = "2.8.3"
FUNCTIONS = "flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache"
PADDING = "pad_input, unpad_input"


def install(folder: Path) -> None:
    """Writes the package, with what says that it is installed, and puts it on the path of
    imports."""
    files = {
        "flash_attn/__init__.py": f"from {__name__} import {FUNCTIONS}\n",
        "flash_attn/bert_padding.py": f"from {__name__} import {PADDING}\n",
        f"flash_attn-{VERSION}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {VERSION}\n"
        ),
        f"flash_attn-{VERSION}.dist-info/top_level.txt": "flash_attn\n",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, str(folder))


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Any:
    import torch

    assert not softcap
    # The package's binding makes numbers of tensors, for which the host waits.
    longest = int(max_seqlen_q), int(max_seqlen_k)
    return torch.ops.aten._flash_attention_forward(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, dropout_p, causal, False),
        scale=softmax_scale,
        window_size_left=window_size[0],
        window_size_right=0 if causal else window_size[1],
    )[0]


def flash_attn_func(*_: Any, **__: Any) -> Any:
    """Not called: all rows have bounds."""
    raise NotImplementedError


flash_attn_with_kvcache = pad_input = unpad_input = flash_attn_func
