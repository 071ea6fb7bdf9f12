"""Quantised folders are refused by name.

Covers lrl/training/weight_files.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lrl.distributed.ranks import Ranks
from lrl.policy import PolicyModule
from lrl.preflight.model import shape_of
from lrl.training.model import open_network
from lrl.training.reference import Reference
from tests.tiny_families import save_tiny

METHODS = [
    *(
        "mxfp4",
        "fp8",
        "compressed-tensors",
        "gptq",
        "awq",
        "bitsandbytes",
        "torchao",
        "modelopt",
        "fbgemm_fp8",
    ),
    *("quark", "hqq", "auto-round", "bitnet", "a method of tomorrow"),
]
CPU = torch.device("cpu")


def refusal(folder: Path) -> str:
    """Returns the one error of all ways in which a run opens a model."""
    reference = Reference(model=str(folder))
    ways: list[Any] = [
        lambda: shape_of(str(folder), None),
        lambda: open_network(str(folder), "float32", None, False),
        lambda: reference.open("elsewhere", "float32", None, CPU, Ranks()),
        lambda: PolicyModule(str(folder)).configure_model(),
    ]
    text = set()
    for way in ways:
        with pytest.raises(ValueError, match="is quantised") as error:
            way()
        text.add(str(error.value))
    assert len(text) == 1
    return text.pop()


@pytest.mark.parametrize("name", METHODS)
def test_a_quantised_model_is_refused_by_name_wherever_it_is_opened(
    name: str, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": name, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refusal(tmp_path)
    assert str(tmp_path) in text and f"quant_method {name}" in text and "bfloat16 copy" in text


@pytest.mark.parametrize(
    "file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"]
)
def test_a_folder_of_an_older_tool_is_refused_by_its_file(file: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / file).write_text("{}")
    assert "quant_method" in refusal(tmp_path)


@pytest.mark.parametrize("key", ["compression_config", "text_config"])
def test_a_word_on_quantisation_is_found_wherever_it_stands(key: str, tmp_path: Path) -> None:
    save_tiny("gemma3" if key == "text_config" else "llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    form = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    if key == "text_config":
        config[key] |= {"quantization_config": form}
    else:
        config[key] = form
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "quant_method compressed-tensors" in refusal(tmp_path)


@pytest.mark.parametrize(
    "numbers", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8]
)
def test_quantised_weights_without_a_word_in_the_config_are_refused(
    numbers: torch.dtype, tmp_path: Path
) -> None:
    save_tiny("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(
        weights | {name: weights[name].to(numbers)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert name in refusal(tmp_path)


def test_a_buffer_of_integers_is_no_quantised_weight(tmp_path: Path) -> None:
    save_tiny("gpt_neo", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    mask = {"transformer.h.0.attn.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    save_file(weights | mask, tmp_path / "model.safetensors", {"format": "pt"})
    assert open_network(str(tmp_path), "float32", None, False)
