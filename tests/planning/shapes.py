"""Shapes of published models, as their configs have them."""

from __future__ import annotations

from typing import Any

LLAMA_8B: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    num_hidden_layers=32,
    vocab_size=128256,
)
LLAMA_70B: dict[str, Any] = LLAMA_8B | dict(
    hidden_size=8192, num_attention_heads=64, intermediate_size=28672, num_hidden_layers=80
)
QWEN_1_5B: dict[str, Any] = dict(
    model_type="qwen2",
    hidden_size=1536,
    num_attention_heads=12,
    num_key_value_heads=2,
    intermediate_size=8960,
    num_hidden_layers=28,
    vocab_size=151936,
    tie_word_embeddings=True,
)
