"""Quantised folders are refused by name."""

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
from lrl.training.beside.reference import Reference
from lrl.training.model import ModelSource
from tests.tiny_families import save_tiny

CPU = torch.device("cpu")


def quantise_by_config(folder: Path, method: str, part: str | None = None) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    entry = {"quantization_config": {"quant_method": method, "bits": 4}}
    (config if part is None else config[part]).update(entry)
    file.write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    """Returns the one error of all ways in which a run opens a model."""
    reference = Reference(model=str(folder))
    ways: list[Any] = [
        lambda: shape_of(str(folder), None),
        lambda: ModelSource(str(folder)).open(),
        lambda: reference.open(ModelSource("elsewhere"), CPU, Ranks()),
        lambda: PolicyModule(str(folder)).configure_model(),
    ]
    text = set()
    for way in ways:
        with pytest.raises(ValueError, match="is quantised") as error:
            way()
        text.add(str(error.value))
    assert len(text) == 1
    return text.pop()


def test_a_quantised_model_is_refused_by_name_wherever_it_is_opened(tmp_path: Path) -> None:
    quantise_by_config(save_tiny("llama", tmp_path), "awq")
    text = refusal(tmp_path)
    assert str(tmp_path) in text and "quant_method awq" in text and "bfloat16 copy" in text


def test_a_word_on_quantisation_in_a_part_of_the_config_is_found(tmp_path: Path) -> None:
    quantise_by_config(save_tiny("gemma3", tmp_path), "compressed-tensors", "text_config")
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
    assert ModelSource(str(tmp_path)).open()
