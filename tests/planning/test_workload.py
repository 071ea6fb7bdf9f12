"""Distributions of lengths, the work of a step, and the time of its generation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.costs import LinearGenerator
from lrl.planning.workload import Lognormal, Workload, drained, parse_lengths, slots_of, steady
from lrl.training.prefix_tree import prefix_trees
from tests.training.test_prefix_tree import drawn

LOGNORMAL = "lognormal:mean=2000,max=8000"
FLAT = LinearGenerator(kv_tokens=10**9, step_s=1e-3)
"""A millisecond a token at every batch size."""
HELD = LinearGenerator(kv_tokens=10**9, context_token_s=1.0)


@settings(deadline=None)
@given(st.floats(2, 5000), st.floats(1.05, 50), st.floats(0.05, 2.5))
def test_a_lognormal_has_its_mean_after_the_cut(mean: float, times: float, sigma: float) -> None:
    lengths = parse_lengths(f"lognormal:mean={mean},max={mean * times},sigma={sigma}")
    assert lengths.mean == pytest.approx(mean, rel=1e-3)
    assert lengths.longest <= mean * times and min(lengths.values) >= 1


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_measured_lengths_are_read_from_a_file(ending: str, tmp_path: Path) -> None:
    texts = {"csv": "id,length\n0,7\n1,3\n2,5\n"}
    texts["jsonl"] = "\n".join(json.dumps({"length": length}) for length in (7, 3, 5))
    file = tmp_path / f"lengths.{ending}"
    file.write_text(texts[ending])
    assert parse_lengths(str(file)).values == (3, 5, 7)


def workload(lengths: str, **changes: int) -> Workload:
    usual = {"prompts": 8, "responses": 4, "prompt_tokens": 100}
    return Workload(lengths=parse_lengths(lengths), **usual | changes)


def test_a_drain_adds_up_all_context_tokens_and_without_room_responses_take_turns() -> None:
    work = workload("fixed:10", prompts=1, responses=2, prompt_tokens=100)
    assert drained(HELD, work, 1).busy_s == 2 * (100 + 5) * 10
    work = workload("fixed:100", prompts=4, responses=4, prompt_tokens=50)
    room_for_four = replace(FLAT, kv_tokens=int(4 * work.live_tokens))
    assert slots_of(room_for_four, work) == 4
    assert drained(room_for_four, work, 1).span_s == pytest.approx(4 * 0.1)
    assert slots_of(replace(FLAT, kv_tokens=work.longest - 1), work) == 0


def test_a_steady_flow_hides_the_tail_of_a_drain_and_less_room_makes_it_slower() -> None:
    work = workload(LOGNORMAL, prompts=64)
    flowing, draining = steady(FLAT, work, 2, lag=1), drained(FLAT, work, 2)
    assert flowing.busy_s < draining.busy_s / 2
    assert flowing.span_s == pytest.approx(draining.span_s)
    tight = steady(replace(FLAT, kv_tokens=20_000), work, 2, lag=1)
    assert tight.slots < flowing.slots and tight.busy_s > flowing.busy_s


@pytest.mark.parametrize("prompt_tokens", [1, 75, 600])
@pytest.mark.parametrize("attention_tokens", [0, 3456])
def test_the_tokens_to_train_are_those_that_are_packed(
    prompt_tokens: int, attention_tokens: int
) -> None:
    sizes = {"prompt_tokens": prompt_tokens, "attention_tokens": attention_tokens}
    work = workload("fixed:40", prompts=3, responses=8, **sizes)
    samples = drawn(0, prompt_tokens, 0, [40] * 8)
    trees = prefix_trees(samples, longest=100_000, attention_tokens=attention_tokens)
    assert (len(trees) < 8) == (attention_tokens > 0 and prompt_tokens > 1)
    assert work.trees == len(trees)
    assert work.tokens == 3 * sum(map(len, trees))
    squared = 3 * sum(len(tree) ** 2 for tree in trees)
    assert work.tokens_squared == pytest.approx(squared, rel=0.01)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_variance_between_prompts_has_its_share(share: float) -> None:
    lengths = Lognormal(1e6, 1.0, 10**9, prompt_share=share)
    logs = np.log([lengths.of(prompt, prompt, 2) for prompt in range(3000)])
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(share, abs=0.06)
    assert lengths.of(5, 5, 2) != replace(lengths, seed=1).of(5, 5, 2)
    next_epoch = np.log([lengths.of(prompt, 3000 + prompt, 1)[0] for prompt in range(3000)])
    assert np.corrcoef(logs[:, 0], next_epoch)[0, 1] == pytest.approx(share, abs=0.06)
