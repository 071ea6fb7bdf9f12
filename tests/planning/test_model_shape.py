"""Parameters counted from a config against transformers' own model, and errors in a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lrl.planning.model_shape import read_shape
from lrl.training.lora import LoRA, is_adapter
from tests.planning.shapes import LLAMA_8B

SIZES: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 200, "num_hidden_layers": 3, "vocab_size": 517, "pad_token_id": 0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {name: size for name, size in LLAMA_8B.items() if name != "model_type"}),
    ("llama", SIZES | {"tie_word_embeddings": True, "head_dim": 24}),
    ("llama", SIZES | {"attention_bias": True, "mlp_bias": True}),
    ("mistral", SIZES),
    ("qwen2", SIZES),
    ("qwen2", SIZES | {"tie_word_embeddings": True}),
    ("qwen3", SIZES | {"head_dim": 32, "tie_word_embeddings": True}),
    ("mixtral", SIZES | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    (
        "qwen3_moe",
        SIZES
        | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16},
    ),
]


@pytest.mark.parametrize(
    ("kind", "sizes"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_parameters_and_kv_bytes_equal_the_models_own(
    kind: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[kind](**sizes)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(tmp_path)
    assert shape.parameters == sum(tensor.numel() for tensor in model.parameters())
    ends = ("k_proj.weight", "v_proj.weight")
    made = [one.shape[0] for name, one in model.named_parameters() if name.endswith(ends)]
    assert shape.kv_bytes == 2 * sum(made)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral"])
def test_adapters_are_as_many_numbers_as_peft_makes(kind: str) -> None:
    config = CONFIG_MAPPING[kind](**SIZES, head_dim=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        LoRA(rank=4).add_to(model)
    made = sum(one.numel() for name, one in model.named_parameters() if is_adapter(name))
    assert read_shape(config.to_dict()).adapter_parameters(4) == made


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gpt2"}, "'gpt2'"),
        ({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}, "intermediate_size"),
        ({"model_type": "qwen3_moe", **SIZES, "mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_an_unknown_shape_is_an_error_with_its_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_shape(config)
