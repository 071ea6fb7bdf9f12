"""The shape of a decoder from its config, with its parameters, FLOPs and KV-cache bytes.

The config is read as JSON and not by transformers: planning needs no torch. `KINDS` has the
architectures whose parameters are counted here to the last norm; any other is an error, not a
guess. A sliding window is not modelled: attention and KV cache are counted over the whole context.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"norms": True},
    "mixtral": {"mixture": True},
    "qwen3_moe": {"norms": True, "mixture": True},
}
"""Known architectures (`model_type`) and their differences from Llama."""
BF16_BYTES = 2
"""Of a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder; all layers are alike."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of one feed-forward network, which is gated: three matrices."""
    vocabulary: int
    tied: bool = False
    """Whether the output head is the embedding."""
    experts: int = 1
    """Feed-forward networks of a layer."""
    experts_per_token: int = 1
    """Feed-forward networks that process a token in each layer."""
    small_per_layer: int = 0
    """Parameters of a layer's norms and biases."""

    def matrices_of_a_layer(self, experts: float) -> float:
        """Returns the parameters in a layer's matrices, with this number of experts."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.hidden * self.experts if self.experts > 1 else 0
        return attention + router + experts * 3 * self.hidden * self.ffn

    @property
    def layer_parameters(self) -> int:
        return int(self.matrices_of_a_layer(self.experts)) + self.small_per_layer

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding; a separate output head has as many."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, tied ones once."""
        ends = self.embedding_parameters * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + ends + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Returns the numbers in low-rank adapters of the layers' matrices; experts have none
        (`lrl.LoRA`)."""
        ends = 4 * self.hidden + 2 * self.head_dim * (self.heads + self.kv_heads)
        if self.experts == 1:
            ends += 3 * (self.hidden + self.ffn)
        return rank * self.layers * ends

    def read_parameters(self, tokens: int) -> float:
        """Returns the mean parameters used in one pass over `tokens` tokens.

        Of a mixture only the chosen experts: if each of n tokens draws k of E experts evenly, E (1
        - (1 - k/E)^n).
        """
        chosen = self.experts * (1 - (1 - self.experts_per_token / self.experts) ** tokens)
        return self.layers * self.matrices_of_a_layer(chosen) + self.embedding_parameters

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a forward pass for one token, without attention: two for each parameter used."""
        return 2 * self.read_parameters(1)

    @property
    def attention_flops(self) -> float:
        """FLOPs of a forward pass for one token and one attended token: scores, weighted sum."""
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers, in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16_BYTES


def read_shape(model: str | Path | Mapping[str, Any]) -> ModelShape:
    """Reads the shape of a model from a folder in Hugging Face format, its `config.json`, or that
    file's content. Raises FileNotFoundError without such a file, and ValueError if it is no JSON,
    its architecture is not known here, or a size is missing."""
    config = model
    if not isinstance(config, Mapping):
        file = Path(config)
        file = file / "config.json" if file.is_dir() else file
        if not file.is_file():
            missing = f"--model is {str(model)!r}, and there is no {file}"
            raise FileNotFoundError(f"{missing}; nothing is downloaded.")
        config = json.loads(file.read_text())
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ValueError(f"model_type is {kind!r} in the model's config; give {', '.join(KINDS)}.")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("mlp_only_layers: layers with and without experts are not known here.")
    try:
        return _shape(config, **KINDS[kind])
    except KeyError as error:
        raise ValueError(f"The model's config has no {error.args[0]}.") from error


def _shape(
    config: Mapping[str, Any], *, qkv_bias: bool = False, norms: bool = False, mixture: bool = False
) -> ModelShape:
    """Returns the shape of a config. Raises KeyError with the name of a missing field."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    projected = (heads + 2 * kv_heads) * head_dim
    small = 2 * hidden + (2 * head_dim if norms else 0)
    small += projected if qkv_bias else 0
    small += projected + hidden if config.get("attention_bias") else 0
    small += 2 * ffn + hidden if config.get("mlp_bias") else 0
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=(config.get("num_experts") or config["num_local_experts"]) if mixture else 1,
        experts_per_token=config["num_experts_per_tok"] if mixture else 1,
        small_per_layer=small,
    )
