"""Clusters as they are typed, and the network between their devices; costs and memory against the one
measured curve, and their laws for every shape and device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from lrl.planning.costs import TrainerCosts
from lrl.planning.model_shape import read_shape
from lrl.planning.roofline import (
    Held,
    RooflineGenerator,
    RooflineTrainer,
    parse_cluster,
    training_memory,
)
from tests.planning.shapes import LLAMA_8B, QWEN_1_5B

FIGURE_6 = {1: 8.4, 4: 8.9, 16: 9.4, 32: 10.2, 64: 11.7, 128: 15.2, 256: 22.0, 512: 37.0}
"""StreamRL's milliseconds a token by batch (7B, H800, vLLM), read off its plot."""
STREAMRL_7B = QWEN_1_5B | dict(
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=8,
    intermediate_size=18944,
    vocab_size=152064,
    tie_word_embeddings=False,
)
LLAMA = read_shape(LLAMA_8B)


def trainer(cluster: str, devices: int, tp: int = 1) -> TrainerCosts:
    how = {"devices": devices, "shards": devices, "tp": tp}
    return RooflineTrainer(shape=LLAMA, cluster=parse_cluster(cluster), **how)


def test_decoding_follows_the_measured_curve_within_ten_percent() -> None:
    costs = RooflineGenerator(shape=read_shape(STREAMRL_7B), cluster=parse_cluster("8xH800"))
    for batch, ms in FIGURE_6.items():
        assert 1e3 * costs.decode_s(batch, batch * 1000) == pytest.approx(ms, rel=0.1), batch


def test_training_holds_sixteen_bytes_a_parameter_over_all_its_shards() -> None:
    state = 16 * LLAMA.parameters
    assert training_memory(LLAMA, 1, 1).fixed == pytest.approx(state, rel=0.03)
    few, many = (training_memory(LLAMA, shards, 1).fixed for shards in (512, 1024))
    assert few - many == pytest.approx(state / 1024)


def test_recomputing_fewer_layers_takes_more_memory_and_less_time() -> None:
    every = [1, 2, 3, 0]
    held = [Held(recompute_every=number) for number in every]
    assert [one.recomputed(LLAMA) for one in held] == [32, 16, 11, 0]
    memory = [training_memory(LLAMA, 8, 1, one).per_token for one in held]
    assert sorted(memory) == memory and len(set(memory)) == len(memory)
    seconds = [replace(trainer("8xH100", 8), held=one).micro_batch_s(10**6, 0) for one in held]
    assert seconds[0] / seconds[-1] == pytest.approx(4 / 3)
    assert seconds[1] / seconds[-1] == pytest.approx(3.5 / 3)


def test_the_one_measured_peak_is_a_little_below_the_forecast() -> None:
    """76.5 GiB of an H200 (benchmarks/gpu/README.md): 1.5 billion weights in float32, nothing
    recomputed, 16,384 tokens."""
    llama = read_shape(QWEN_1_5B | {"model_type": "llama"})
    forecast = training_memory(llama, 1, 1, Held(recompute_every=0)).bytes_for(16_384) / 2**30
    assert 76.5 < forecast < 1.2 * 76.5


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config, Qwen3Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_is_not_recomputed_keeps_no_more_than_is_forecast(
    kind: Any, dtype: torch.dtype
) -> None:
    def kept(layers: int, tokens: int) -> int:
        """Bytes that a forward pass keeps, besides the weights."""
        config = kind(**small | {"num_hidden_layers": layers})
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
        weights = {weight.untyped_storage()._cdata for weight in network.parameters()}
        found: list[Tensor] = []
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32)
        with autocast, saved_tensors_hooks(lambda one: found.append(one) or one, lambda one: one):
            network.model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in found}
        return sum(one.nbytes() for place, one in storages.items() if place not in weights)

    small = dict(hidden_size=256, intermediate_size=1024, num_attention_heads=4, head_dim=64)
    small |= dict(num_key_value_heads=2, vocab_size=32, num_hidden_layers=1)
    counted = (kept(2, 32) - kept(2, 16) - kept(1, 32) + kept(1, 16)) / 16
    one_layer = read_shape({"model_type": kind.model_type, **small})
    whole, part = (
        training_memory(one_layer, 1, 1, Held(recompute_every=every)) for every in (0, 1)
    )
    assert counted <= whole.per_token - part.per_token < 1.5 * counted
