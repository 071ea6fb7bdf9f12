"""Operations, memory, medians, and kinds of kernels of the benchmarks on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import random_policy
from benchmarks.gpu import one_gpu, trainer
from benchmarks.gpu.memory_plan import plan_memory
from benchmarks.gpu.step_of_ranks import Expected


def test_how_far_passes_are_off_is_a_share_of_what_is_expected() -> None:
    expected = Expected(2.0, 4.0, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    off = expected.off(2.2, 3.0, {"a": torch.tensor([3.0]), "b": torch.tensor([4.5])})
    wanted = {"loss_off": 0.1, "norm_off": 0.25, "gradient_off": 0.1}
    assert all(math.isclose(off[name], value, rel_tol=1e-6) for name, value in wanted.items())


@pytest.mark.parametrize(("size", "parameters"), [("0.5b", 494_005_120), ("8b", 8_030_261_248)])
def test_a_policy_is_as_large_as_its_name(size: str, parameters: int) -> None:
    assert random_policy.num_parameters(random_policy.llama(size)) == parameters


def test_the_operations_of_a_step_are_six_a_token_and_parameter_and_a_tied_embedding_counts_as_the_head() -> (
    None
):
    config = random_policy.llama("0.5b")
    everything = 6.0 * random_policy.num_parameters(config)
    assert trainer.flops(config, tokens=10, response_tokens=10) == 10 * everything
    head = 6.0 * config.vocab_size * config.hidden_size
    assert trainer.flops(config, tokens=10, response_tokens=0) == 10 * (everything - head)
    untied = random_policy.llama("8b")
    both = 2 * 6.0 * untied.vocab_size * untied.hidden_size
    assert trainer.flops(untied, 10, 0) == 10 * (6.0 * random_policy.num_parameters(untied) - both)


def test_the_memory_plan_includes_keys_and_values_of_all_responses() -> None:
    # 128 KiB a token, as Llama-3.1.
    assert plan_memory(random_policy.llama("8b")).kv_cache == 128 * 1024 * 128 * 1024


def test_the_first_steps_and_the_last_are_not_measured() -> None:
    times = [90.0, 80.0, 3.0, 1.0, 2.0, 0.1]
    steps = [{"step_s": seconds} for seconds in times]
    assert one_gpu.medians(steps)["step_s"] == 2.0
