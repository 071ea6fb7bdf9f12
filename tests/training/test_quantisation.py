"""Quantised folders are refused by name, and `lrl dequantize` writes whole ones, with every
tensor.

Covers lrl/training/dequantisation.py, weight_files.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lrl.cli.main import main
from lrl.distributed.ranks import Ranks
from lrl.policy import PolicyModule
from lrl.preflight.model_folder import shape_of
from lrl.training.dequantisation import from_fp8
from lrl.training.model import open_network
from lrl.training.reference import Reference
from tests.quantised_policies import BLOCK, quantised, write
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


@pytest.fixture(scope="module", params=["mxfp4", "fp8"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(method: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantised(method, tmp_path_factory.mktemp("quantised") / "policy")


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "policy"
    assert main(["dequantize", str(folder), str(out)]) == 0
    return out


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
    write(tmp_path, load_file(tmp_path / "model.safetensors"), {"quant_method": name, "bits": 4})
    text = refusal(tmp_path)
    assert str(tmp_path) in text and f"quant_method {name}" in text
    remedy = (
        f"`lrl dequantize {tmp_path} OUT`"
        if name in ("mxfp4", "fp8")
        else "Take the model in bfloat16"
    )
    assert remedy in text


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


def by_definition(folder: Path, method: str) -> dict[str, Tensor]:
    """Returns the whole weights in float32, number by number as the form's definition says."""
    stored = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            scales = stored[name.replace("_blocks", "_scales")]
            found[name.removesuffix("_blocks")] = experts(tensor, scales)
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = stored[f"{name}_scale_inv"]
            rows, columns = tensor.shape
            factors = [
                [scale[row // BLOCK[0], column // BLOCK[1]] for column in range(columns)]
                for row in range(rows)
            ]
            found[name] = tensor.float() * torch.tensor(factors)
        elif not name.endswith(("_scales", "_scale_inv")):
            found[name] = tensor.float()
    return found


def experts(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns [experts, inputs, outputs]: number i of a row is half i of its bytes, times the scale
    of its 32."""
    count, rows, groups, _ = blocks.shape
    found = torch.empty(count, 32 * groups, rows)
    values, powers = blocks.flatten(2).tolist(), scales.tolist()
    for expert in range(count):
        for row in range(rows):
            for column in range(32 * groups):
                byte = values[expert][row][column // 2]
                half = byte >> 4 if column % 2 else byte & 15
                found[expert, column, row] = e2m1(half) * 2.0 ** (
                    powers[expert][row][column // 32] - 127
                )
    return found


def e2m1(half: int) -> float:
    """Returns the number of four bits: a sign, two of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = -1.0 if half & 8 else 1.0, half >> 1 & 3, half & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def test_a_dequantised_model_has_the_numbers_of_its_form_and_every_tensor(
    folder: Path, whole: Path, method: str, tmp_path: Path
) -> None:
    wanted = by_definition(folder, method)
    found = load_file(whole / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name].bfloat16()), name
    assert main(["dequantize", str(folder), str(tmp_path / "exact"), "--dtype", "float32"]) == 0
    for name, tensor in load_file(tmp_path / "exact" / "model.safetensors").items():
        assert torch.equal(tensor, wanted[name]), name
    names = {file.name for file in whole.iterdir()}
    assert names == {file.name for file in folder.iterdir()}
    config = json.loads((whole / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"


def test_a_sync_and_an_export_of_a_dequantised_policy_have_all_of_its_weights(
    whole: Path, tmp_path: Path
) -> None:
    wanted = {
        name: tensor.float() for name, tensor in load_file(whole / "model.safetensors").items()
    }
    policy = PolicyModule(str(whole))
    policy.configure_model()
    sent = dict(policy.sent_weights())
    policy.export(tmp_path / "policy")
    exported = load_file(tmp_path / "policy" / "model.safetensors")
    assert sent.keys() == exported.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(sent[name], tensor) and torch.equal(exported[name], tensor), name
    assert open_network(str(tmp_path / "policy"), "float32", None, False)


def test_a_model_in_several_files_is_whole_too(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_file(folder / "model.safetensors")
    apart = quantised_in_two(folder, stored, tmp_path / "two")
    monkeypatch.setattr("lrl.training.dequantisation.FILE_BYTES", 15_000)
    assert main(["dequantize", str(apart), str(tmp_path / "out")]) == 0
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    wanted = load_file(whole / "model.safetensors")
    assert len(files) > 2 and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert open_network(str(tmp_path / "out"), "float32", None, False)


def quantised_in_two(folder: Path, stored: dict[str, Tensor], out: Path) -> Path:
    """Writes the folder with its scales in another file than what they scale."""
    out.mkdir()
    for file in folder.glob("*.json"):
        (out / file.name).write_bytes(file.read_bytes())
    where = {
        name: "scales.safetensors" if "_scale" in name else "rest.safetensors" for name in stored
    }
    for file_name in set(where.values()):
        save_file(
            {name: stored[name] for name in stored if where[name] == file_name}, out / file_name
        )
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return out


def broken(kind: str, method: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    scale = next(name for name in stored if "_scale" in name)
    layer = next(name for name in stored if name.endswith("q_proj.weight"))
    if kind == "a scale is missing":
        return {name: tensor for name, tensor in stored.items() if name != scale}
    if kind == "a weight is missing":
        return {
            name: tensor
            for name, tensor in stored.items()
            if not name.endswith("layers.1.input_layernorm.weight")
        }
    if kind == "a weight is left over":
        return stored | {"model.layers.0.mlp.extra.weight": torch.zeros(2)}
    if kind == "a weight has another shape":
        return stored | {"model.norm.weight": torch.zeros(7)}
    return stored | {layer: torch.zeros(stored[layer].shape, dtype=torch.int8)}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("a scale is missing", "there is no"),
        ("a weight is missing", "lacks: model.layers.1.input_layernorm.weight"),
        ("a weight is left over", "its model does not: model.layers.0.mlp.extra.weight"),
        (
            "a weight has another shape",
            "in another shape than its config.json says: model.norm.weight",
        ),
        ("numbers are unknown", "is stored as I8"),
    ],
)
def test_what_is_not_the_whole_model_is_named_and_nothing_is_written(
    kind: str,
    text: str,
    folder: Path,
    method: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(
        broken(kind, method, load_file(folder / "model.safetensors")),
        tmp_path / "model.safetensors",
    )
    assert main(["dequantize", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lrl: error: ") and text in error and not (tmp_path / "out").exists()


def test_other_forms_and_folders_are_named_with_what_to_do(
    whole: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny("llama", tmp_path / "gptq")
    write(
        tmp_path / "gptq",
        load_file(tmp_path / "gptq" / "model.safetensors"),
        {"quant_method": "gptq", "bits": 4},
    )
    cases = {
        (str(tmp_path / "gptq"), str(tmp_path / "out")): "quant_method gptq",
        (str(whole), str(tmp_path / "out")): "is not quantised",
        (str(folder), str(whole)): "give a new folder",
        (str(tmp_path), str(tmp_path / "out")): "holds no model",
        (str(tmp_path / "none" / "of" / "these"), str(tmp_path / "out")): "no such folder",
    }
    for words, text in cases.items():
        assert main(["dequantize", *words]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_scale_for_a_whole_weight_and_scales_that_are_exponents() -> None:
    weight = torch.arange(-4, 4).reshape(2, 4).to(torch.float8_e4m3fn)
    once = from_fp8(weight, torch.tensor(0.5), None, torch.float32)
    assert torch.equal(once, weight.float() / 2)
    exponents = from_fp8(
        weight, torch.tensor([[126, 128]], dtype=torch.uint8), (2, 2), torch.float32
    )
    assert torch.equal(exponents, weight.float() * torch.tensor([0.5, 0.5, 2.0, 2.0]))
    with pytest.raises(ValueError, match="the scales are"):
        from_fp8(weight, torch.ones(3, 1), (2, 2), torch.float32)
