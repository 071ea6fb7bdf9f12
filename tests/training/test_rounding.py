"""What a number format does to a model's log-probs, without computing in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lrl.training.collate import text_as_micro_batch
from lrl.training.logprobs import label_logprobs
from lrl.training.model import ModelSource
from lrl.training.rounding import rounded_weights, rounding_errors
from tests.tiny_policies import save_tiny

TOKENS = [3 + (7 * place) % 59 for place in range(64)]


@torch.no_grad()
def logprobs(network: PreTrainedModel) -> Tensor:
    micro = text_as_micro_batch(TOKENS, torch.device("cpu"))
    return label_logprobs(network, micro, chunk_tokens=64)[micro.mask]


def off(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().mean().item()


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe", "granite"])
def test_the_errors_are_as_large_as_the_formats_rounding(
    family: str, scale: float, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path, scale)
    exact, half = ModelSource(folder).open(), ModelSource(folder, "bfloat16").open()
    real = off(logprobs(half), logprobs(exact))
    assert 0.5 * real < by_errors(exact) < 3 * real
    assert 0.5 * real < by_errors(half) < 5 * real, "of a policy that is in that format itself"


def by_errors(network: PreTrainedModel) -> float:
    without = logprobs(network)
    with rounding_errors(network, "bfloat16"):
        return off(logprobs(network), without)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "granite"])
def test_weights_are_rounded_while_a_model_computes_and_whole_behind_it(
    family: str, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path, 4.0)
    network, held = (ModelSource(folder).open() for _ in range(2))
    for weight in held.parameters():
        weight.data = weight.data.bfloat16().float()
    before, weights = logprobs(network), dict(network.named_parameters())
    with rounded_weights(network, "bfloat16"):
        assert torch.equal(logprobs(network), logprobs(held))
    assert not torch.equal(logprobs(held), before)
    assert torch.equal(logprobs(network), before)
    assert all(weights[name] is weight for name, weight in network.named_parameters())
    with pytest.raises(IndexError), rounded_weights(network, "bfloat16"):
        network.model(input_ids=torch.tensor([[10**6]]))
    assert torch.equal(logprobs(network), before), "also behind a pass that fails"


def test_nothing_stays_behind(tmp_path: Path) -> None:
    network = ModelSource(save_tiny("llama", tmp_path, 4.0)).open()
    before, state = logprobs(network), torch.get_rng_state()
    with pytest.raises(KeyError), rounding_errors(network, "float16"):
        changed = logprobs(network)
        raise KeyError
    assert torch.equal(logprobs(network), before) and torch.equal(torch.get_rng_state(), state)
    assert 0 < off(changed, before) < 0.01
