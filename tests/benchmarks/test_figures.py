"""What the benchmarks compute: intervals, drawn lengths, means, ratios, operations."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import overlap, random_policy
from benchmarks.against_trl import speed
from benchmarks.forced_lengths import long_tailed
from benchmarks.gpu import trainer
from benchmarks.lag_sweep import lag_cell
from benchmarks.records import accuracy_interval
from benchmarks.skewness import OTHERS, Oracle
from lrl.evaluation import wilson_interval
from lrl.types import Prompt


def test_an_interval_is_as_wide_as_the_seeds_spread_and_never_narrower_than_the_problems_allow() -> (
    None
):
    assert accuracy_interval([0.9], 500) == (0.9, *wilson_interval(0.9, 500))
    same = accuracy_interval([0.9, 0.9, 0.9], 500)
    assert same == pytest.approx((0.9, *wilson_interval(0.9, 500)))
    half = 4.303 * 0.1 / 3**0.5
    assert accuracy_interval([0.4, 0.5, 0.6], 500) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert accuracy_interval([0.1, 0.9], 500)[1:] == (0.0, 1.0)


def test_an_oracle_expects_the_drawn_responses_and_an_epoch_before_had_others() -> None:
    lengths = long_tailed(seed=3, prompt_share=0.5)
    oracle = Oracle(lengths, prompts=64, responses=4)
    for prompt in range(64):
        drawn = lengths.of(prompt, prompt, 4)
        assert oracle.expected(Prompt(id=prompt, token_ids=[1], text="")) == sum(drawn) / 4
    assert oracle.quantile(1.0) == max(max(lengths.of(prompt, prompt, 4)) for prompt in range(64))
    assert lengths.of(7, OTHERS + 7, 4) != lengths.of(7, 7, 4)


def test_lag_is_a_mean_over_tokens_and_steps_without_tokens_have_none() -> None:
    series = {"lag_mean": [0.5, None, 1.0], "lag_max": [1.0, None, 2.0], "tokens": [100, 0, 300]}
    assert lag_cell([{"series": series}]) == f"{(50 + 300) / 400:.2f} (2)"


def test_a_ratio_is_to_the_slower_side_alone_and_to_the_faster_of_trls_ways() -> None:
    def took(seconds: float) -> dict[str, Any]:
        return dict.fromkeys(("step", "wait", "train", "sync", "sync_pause"), [seconds] * 3)

    steps = {"asynchronous": 3.3, "writing": 1.0, "training": 3.0, "synchronous": 6.6}
    rows = [{"system": n, "lengths": "equal", **took(seconds)} for n, seconds in steps.items()]
    found = overlap.table(rows)
    assert "1.10 times the larger of both alone" in found
    assert "2.00 times as fast as lrl's synchronous one" in found
    speeds = {"trl": 20.0, "trl-pieces": 25.0, "split": 30.0, "trainer-all": 40.0}
    shared = {"lengths": "equal", "trl": "1", "writing": [1.0] * 3} | took(1.0)
    rows = [shared | {"system": name, "answers_per_s": value} for name, value in speeds.items()]
    assert "trains 1.60 times TRL's responses" in speed.table(rows)


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
