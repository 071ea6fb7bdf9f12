"""The activations that are forecast are those that a real forward pass keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import Gemma2Config, LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen3Config

from lrl.training.activation_bytes import activation_bytes
from lrl.training.collate import fill_rows
from lrl.training.lora import LoRA
from lrl.training.model import decoder_of, last_hidden, open_meta_model, open_network
from lrl.training.prefix_tree import PrefixTree, text_sequence
from tests.test_policy import SIZES, save_model

WIDE = SIZES | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
TOKENS = 24
KINDS: dict[str, tuple[PreTrainedConfig, LoRA | None]] = {
    "llama": (LlamaConfig(**WIDE), None),
    "qwen3": (Qwen3Config(**WIDE, head_dim=16), None),
    "gemma2": (Gemma2Config(**WIDE, head_dim=16), None),
    "adapters": (LlamaConfig(**WIDE), LoRA(rank=2)),
}


def kept(folder: str, lora: LoRA | None) -> int:
    """Bytes that the forward pass of a packed row keeps, besides weights."""
    network = open_network(folder, "float32", None, False)
    if lora is not None:
        lora.add_to(network)
    weights = {weight.untyped_storage()._cdata for weight in network.parameters()}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    half = text_sequence([5] * (TOKENS // 2))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        last_hidden(
            decoder_of(network),
            fill_rows([[PrefixTree([half]), PrefixTree([half])]], temperature=1.0),
        )
    storages = [found[one].untyped_storage().nbytes() for one in found.keys() - weights]
    return sum(storages)


@pytest.mark.parametrize("kind", KINDS)
def test_the_forecast_is_what_a_packed_row_keeps(kind: str, tmp_path: Path) -> None:
    config, lora = KINDS[kind]
    folder = save_model(tmp_path, config)
    network = open_meta_model(folder, None).train()
    if lora is not None:
        lora.add_to(network)
    forecast = activation_bytes(network, False)
    assert forecast is not None
    assert forecast * TOKENS == pytest.approx(kept(folder, lora), rel=0.15)


def test_a_checkpointed_layer_keeps_its_input_alone(tmp_path: Path) -> None:
    network = open_meta_model(save_model(tmp_path, LlamaConfig(**WIDE)), None).train()
    whole, part = activation_bytes(network, False), activation_bytes(network, True)
    assert whole is not None and part is not None
    assert part == pytest.approx(whole / 3 + 3 * 64 * 4)


def test_half_the_bytes_are_half_the_activations(tmp_path: Path) -> None:
    network = open_meta_model(save_model(tmp_path, LlamaConfig(**WIDE)), None).train()
    whole, half = activation_bytes(network, False), activation_bytes(network.bfloat16(), False)
    assert whole is not None and half is not None
    assert 0.5 * whole < half < 0.75 * whole  # the norms compute in float32


def test_a_model_that_needs_data_has_no_forecast(tmp_path: Path) -> None:
    mixture = MixtralConfig(**WIDE, num_local_experts=4)
    network = open_meta_model(save_model(tmp_path, mixture), None).train()
    assert activation_bytes(network, False) is None
