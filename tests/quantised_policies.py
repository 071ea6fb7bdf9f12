"""Tiny quantised policies for tests, as gpt-oss and Qwen3-8B-FP8 are published."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_families import save_tiny
from tests.tiny_policies import byte_tokenizer

BLOCK = (16, 32)
"""Of fp8; neither 48 rows nor 32 columns of a layer need be a multiple."""


def quantised(method: str, folder: Path, method_settings: dict[str, Any] | None = None) -> Path:
    """Writes a tiny model in a form that lrl reads, mxfp4 or fp8; returns the folder."""
    tokens = {"vocab_size": 259, "eos_token_id": 2, "pad_token_id": 0}
    if method == "mxfp4":
        save_tiny(
            "gpt_oss", folder, hidden_size=64, intermediate_size=96, num_local_experts=3, **tokens
        )
    else:
        save_tiny("qwen3", folder, hidden_size=40, intermediate_size=48, head_dim=8, **tokens)
    weights = load_file(folder / "model.safetensors")
    form = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    if method == "mxfp4":
        write(folder, {name: one for each in weights.items() for name, one in mxfp4(*each)}, form)
    else:
        form |= {"weight_block_size": list(BLOCK), "activation_scheme": "dynamic"} | (
            method_settings or {}
        )
        write(
            folder, {name: one for each in weights.items() for name, one in fp8(*each, form)}, form
        )
    byte_tokenizer().save_pretrained(folder)
    return folder


def write(folder: Path, weights: dict[str, Tensor], form: dict[str, Any] | None) -> None:
    """Writes weights, and their form into config.json."""
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16"} | ({} if form is None else {"quantization_config": form})
    (folder / "config.json").write_text(json.dumps(config))


def mxfp4(name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
    """Returns the tensors in the place of one: random numbers, where an expert's matrix is."""
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: weight.bfloat16()}.items()
    experts, inputs, outputs = weight.shape
    draw = torch.Generator().manual_seed(inputs)
    blocks = torch.randint(
        0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw
    )
    scales = torch.randint(
        118, 124, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=draw
    )
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}.items()


def fp8(name: str, weight: Tensor, form: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
    """Returns the tensors in the place of one: scaled ones, where a layer's matrix is."""
    if not name.endswith("_proj.weight"):
        return {name: weight.bfloat16()}.items()
    rows, columns = form["weight_block_size"] or weight.shape
    found, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), []
    for row in range(0, weight.shape[0], rows):
        scales.append([])
        for column in range(0, weight.shape[1], columns):
            part = weight[row : row + rows, column : column + columns]
            scales[-1].append(part.abs().max().item() / 448)
            found[row : row + rows, column : column + columns] = (part / scales[-1][-1]).to(
                torch.float8_e4m3fn
            )
    scale = torch.tensor(scales) if form["weight_block_size"] else torch.tensor(scales[0][0])
    return {name: found, f"{name}_scale_inv": scale}.items()
