"""What a step counts and computes is float32 whatever the weights are, and a format in which it
were not is refused, as are quantised weights.

Covers lrl/policy.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from safetensors.torch import load_file, save_file
from torch import Tensor

import lrl
from lrl.objectives.base import NormaliseBy
from lrl.preflight.model import shape_of
from lrl.training.lora import LoRA
from lrl.training.model import ModelSource, open_config
from lrl.types import MicroBatch
from tests.policies import FakeStep, fit, flat_gradient, make_group, pack
from tests.run_without_generators import trainer as running
from tests.tiny_policies import save_tiny

LENGTHS = (1000, 40, 700, 300)


@pytest.mark.parametrize(
    "settings", [{"precision": "16-true"}, {"plugins": [HalfPrecision("bf16-true")]}]
)
def test_a_precision_in_which_a_step_is_not_float32_is_refused_in_a_script(
    settings: dict[str, Any], policy: str, tmp_path: Path
) -> None:
    with pytest.raises(lrl.ConfigError, match="bf16-mixed"):
        running(tmp_path, **settings).fit(lrl.PolicyModule(policy), [])


def test_another_default_dtype_of_torch_is_refused(policy: str, tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(lrl.ConfigError, match=r"set model\.dtype"):
            running(tmp_path).fit(lrl.PolicyModule(policy), [])
    finally:
        torch.set_default_dtype(before)


class Watched(lrl.PolicyModule):
    """A policy whose log-probs and gradient are looked at."""

    def configure_callbacks(self) -> list[L.Callback]:
        return []

    def compute_loss(self, micro: MicroBatch) -> Tensor:
        self.logprobs = self(micro)[micro.mask].detach()
        return super().compute_loss(micro)

    def on_before_optimizer_step(self, optimizer: object) -> None:
        self.gradient = flat_gradient(self).float()


def trained(folder: str, dtype: Any, by: NormaliseBy, lora: LoRA | None) -> Watched:
    """Trains one step on long responses, with the same bfloat16 numbers as weights in both
    dtypes."""
    torch.manual_seed(1)
    policy = Watched(folder, dtype=dtype, lr=0.0, lora=lora, normalise_by=by, max_grad_norm=None)
    policy.configure_model()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.copy_(weight.bfloat16())
    fit(policy, [FakeStep(pack([make_group(0, lengths=LENGTHS, tokens=259)], 4096))])
    return policy


@pytest.mark.parametrize(("by", "lora"), [("token", LoRA(rank=4)), ("sequence", None)])
def test_a_step_of_bfloat16_weights_counts_exactly_and_has_float32_logprobs(
    by: NormaliseBy, lora: LoRA | None, policy: str
) -> None:
    exact, found = (trained(policy, dtype, by, lora) for dtype in ("float32", "bfloat16"))
    assert found.logprobs.dtype == torch.float32 and found.diagnostics.sums.dtype == torch.float32
    assert found.diagnostics.sums[:, 0].sum() == sum(LENGTHS)
    assert len(set(found.logprobs.tolist())) > 0.9 * sum(LENGTHS), (
        "bfloat16 has fewer numbers there"
    )
    assert (found.logprobs - exact.logprobs).abs().mean() < 0.01
    assert torch.cosine_similarity(found.gradient, exact.gradient, dim=0) > 0.99
    assert found.gradient.norm() / exact.gradient.norm() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("empty", [False, True])
def test_positions_of_bfloat16_weights_are_exact(empty: bool, policy: str) -> None:
    positions = torch.arange(2000)[None]
    hidden = torch.zeros(1, 1, dtype=torch.bfloat16)
    exact = ModelSource(policy).open().model.rotary_emb(hidden.float(), positions)
    source = ModelSource(policy, "bfloat16")
    network: Any = source.open_empty(open_config(policy)) if empty else source.open()
    found = network.model.rotary_emb(hidden, positions)
    assert all(
        torch.equal(ours, theirs.bfloat16()) for ours, theirs in zip(found, exact, strict=True)
    )


@pytest.mark.parametrize(("family", "part"), [("llama", None), ("gemma3", "text_config")])
def test_a_quantised_model_is_refused(family: str, part: str | None, tmp_path: Path) -> None:
    file = Path(save_tiny(family, tmp_path), "config.json")
    config = json.loads(file.read_text())
    entry = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (config if part is None else config[part]).update(entry)
    file.write_text(json.dumps(config))
    for way in (ModelSource(str(tmp_path)).open, lambda: shape_of(str(tmp_path), None)):
        with pytest.raises(ValueError, match=f"{tmp_path}.*quant_method awq.*bfloat16 copy"):
            way()


@pytest.mark.parametrize("numbers", [torch.float8_e4m3fn, torch.uint8])
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
    with pytest.raises(ValueError, match=f"{name} is stored as"):
        ModelSource(str(tmp_path)).open()


def test_a_buffer_of_integers_is_no_quantised_weight(tmp_path: Path) -> None:
    save_tiny("gpt_neo", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    mask = {"transformer.h.0.attn.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    save_file(weights | mask, tmp_path / "model.safetensors", {"format": "pt"})
    assert ModelSource(str(tmp_path)).open()
