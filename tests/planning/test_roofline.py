"""Costs and memory against the one measured curve, and their laws for every shape and device."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning import roofline
from lrl.planning.cluster import parse_cluster
from lrl.planning.costs import GeneratorCosts, TrainerCosts
from lrl.planning.model_shape import read_shape
from lrl.planning.roofline import (
    RooflineGenerator,
    RooflineTrainer,
    generation_memory,
    training_memory,
    usable,
)
from tests.planning.shapes import LLAMA_8B, QWEN_1_5B, shape

FIGURE_6 = {1: 8.4, 4: 8.9, 16: 9.4, 32: 10.2, 64: 11.7, 128: 15.2, 256: 22.0, 512: 37.0}
"""StreamRL's milliseconds a token by batch (7B, H800, vLLM), read off its plot."""
STREAMRL_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 8,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
}
POWERS = st.integers(0, 3).map(lambda power: 2**power)


def generator(tp: int = 1, **changes: object) -> GeneratorCosts:
    return RooflineGenerator(
        shape=shape(LLAMA_8B), cluster=parse_cluster("16xH100"), tp=tp, **changes
    )  # type: ignore[arg-type]


def test_decoding_follows_the_measured_curve_within_ten_percent() -> None:
    costs = RooflineGenerator(shape=read_shape(STREAMRL_7B), cluster=parse_cluster("8xH800"))
    errors = {
        batch: 1e3 * costs.decode_s(batch, batch * 1000) / ms - 1 for batch, ms in FIGURE_6.items()
    }
    assert max(map(abs, errors.values())) < 0.1, errors


def test_one_response_reads_the_weights_once() -> None:
    costs = RooflineGenerator(shape=shape(LLAMA_8B), cluster=parse_cluster("1xH100"))
    reading = 2 * costs.shape.read_parameters(1) / (0.8 * 3.35e12)
    assert costs.decode_s(1, 0) == pytest.approx(reading + roofline.STEP_OVERHEAD_S)


def test_many_responses_take_their_flops() -> None:
    costs = RooflineGenerator(shape=shape(LLAMA_8B), cluster=parse_cluster("1xH100"))
    computing = 4096 * 2 * costs.shape.read_parameters(1) / (0.55 * 989.4e12)
    assert costs.decode_s(4096, 0) == pytest.approx(computing + roofline.STEP_OVERHEAD_S)


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(0, 10**6), POWERS)
def test_decoding_grows_with_responses_and_context_and_batching_gains(
    n: int, context: int, tp: int
) -> None:
    costs = generator(tp)
    assert costs.decode_s(n + 1, context) >= costs.decode_s(n, context)
    assert costs.decode_s(n, context + 1000) > costs.decode_s(n, context)
    assert costs.decode_s(n + 1, context) / (n + 1) < costs.decode_s(n, context) / n


def test_fp8_halves_the_weights_and_not_the_kv_cache() -> None:
    half, whole = generator(precision="fp8"), generator()
    weights = 2 * shape(LLAMA_8B).parameters
    assert half.kv_tokens - whole.kv_tokens == pytest.approx(
        weights / 2 / shape(LLAMA_8B).kv_bytes, abs=1
    )
    assert half.sync_pause_s() == pytest.approx(whole.sync_pause_s() / 2)


def test_a_generator_across_nodes_pays_for_the_network() -> None:
    within = RooflineGenerator(shape=shape(LLAMA_8B), cluster=parse_cluster("16xH100"), tp=16)
    one_node = RooflineGenerator(
        shape=shape(LLAMA_8B), cluster=parse_cluster("16xH100", devices_per_node=16), tp=16
    )
    more = within.decode_s(1, 0) - one_node.decode_s(1, 0)
    # Two all-reduces in each of 32 layers.
    assert more > 2 * 32 * roofline.NETWORK_LATENCY_S


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_weights_and_kv_cache_fill_the_usable_memory(tp: int) -> None:
    costs = generator(tp)
    taken = generation_memory(shape(LLAMA_8B), tp, "bf16")
    room = usable(parse_cluster("1xH100").device)
    assert taken.bytes_for(costs.kv_tokens) <= room < taken.bytes_for(costs.kv_tokens + 1)


def test_weights_that_do_not_fit_leave_no_kv_cache() -> None:
    costs = RooflineGenerator(shape=shape(LLAMA_8B), cluster=parse_cluster("1xH100"), room=15e9)
    assert costs.kv_tokens == 0


def test_training_computes_four_forward_passes() -> None:
    costs: TrainerCosts = RooflineTrainer(
        shape=shape(LLAMA_8B), cluster=parse_cluster("1xH100"), devices=1, shards=1
    )
    flops = 4 * 1000 * 2 * shape(LLAMA_8B).read_parameters(1)
    assert costs.micro_batch_s(1000, 0) == pytest.approx(flops / (0.55 * 989.4e12))
    attended = 4 * shape(LLAMA_8B).attention_flops * 1000**2 / 2
    assert costs.micro_batch_s(1000, 1000**2) == pytest.approx(
        (flops + attended) / (0.55 * 989.4e12)
    )


@settings(deadline=None)
@given(POWERS, st.integers(1, 6), st.integers(100, 10**6))
def test_a_larger_micro_batch_costs_no_more_per_token(tp: int, power: int, tokens: int) -> None:
    costs = RooflineTrainer(
        shape=shape(LLAMA_8B),
        cluster=parse_cluster("512xH100"),
        devices=tp * 2**power,
        shards=tp * 2**power,
        tp=tp,
    )
    assert costs.micro_batch_s(2 * tokens, 0) <= 2 * costs.micro_batch_s(tokens, 0) * (1 + 1e-9)


def test_small_micro_batches_are_bound_by_the_network_and_large_ones_by_compute() -> None:
    costs = RooflineTrainer(
        shape=shape(LLAMA_8B), cluster=parse_cluster("64xH100"), devices=64, shards=64
    )
    assert costs.micro_batch_s(64, 0) == costs.micro_batch_s(128, 0)
    assert costs.micro_batch_s(64 * 2**18, 0) == pytest.approx(
        2 * costs.micro_batch_s(64 * 2**17, 0)
    )


def test_training_holds_sixteen_bytes_a_parameter_over_all_its_shards() -> None:
    eight_b = shape(LLAMA_8B)
    assert training_memory(eight_b, 1, 1).fixed == pytest.approx(16 * eight_b.parameters, rel=0.02)
    spread = training_memory(eight_b, 1024, 1), training_memory(eight_b, 512, 1)
    assert spread[1].fixed - spread[0].fixed == pytest.approx(16 * eight_b.parameters / 1024)


def test_tensor_parallelism_splits_the_memory_of_tokens() -> None:
    whole, half = (training_memory(shape(QWEN_1_5B), 8, tp).per_token for tp in (1, 2))
    assert half == whole / 2
