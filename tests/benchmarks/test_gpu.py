"""Operations, memory, medians, and kinds of kernels of the benchmarks on a GPU."""

from __future__ import annotations

from benchmarks import random_policy
from benchmarks.gpu import trainer


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
