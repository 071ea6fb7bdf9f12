"""Distributions of lengths, the work of a step, and the time of its generation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.costs import LinearGenerator
from lrl.planning.report import bottleneck, in_flight
from lrl.planning.roofline import parse_cluster
from lrl.planning.search import Layouts, split
from lrl.planning.workload import (
    Episodes,
    GenerationPhase,
    Workload,
    drained,
    parse_lengths,
    slots_of,
    steady,
)
from lrl.training.prefix_tree import prefix_trees
from tests.planning.shapes import QWEN_1_5B, shape
from tests.training.test_prefix_tree import drawn

LOGNORMAL = "lognormal:mean=2000,max=8000"
FLAT = LinearGenerator(kv_tokens=10**9, step_s=1e-3)
"""A millisecond a token at every batch size."""
SHARED = LinearGenerator(kv_tokens=10**9, step_s=8e-3, response_s=1e-3)
"""Batching gains."""
HELD = LinearGenerator(kv_tokens=10**9, context_token_s=1.0)


@settings(deadline=None)
@given(st.floats(2, 5000), st.floats(1.05, 50), st.floats(0.05, 2.5))
def test_a_lognormal_has_its_mean_after_the_cut(mean: float, times: float, sigma: float) -> None:
    lengths = parse_lengths(f"lognormal:mean={mean},max={mean * times},sigma={sigma}")
    assert lengths.mean == pytest.approx(mean, rel=1e-3)
    assert lengths.longest <= mean * times and min(lengths.values) >= 1


def test_a_steps_lengths_have_the_distributions_mean_and_the_longest_grows_with_their_number() -> (
    None
):
    lengths = parse_lengths(LOGNORMAL)
    assert np.mean(lengths.of(2048)) == pytest.approx(lengths.mean, rel=0.01)
    assert lengths.of(4)[-1] < lengths.of(64)[-1] <= lengths.of(4096)[-1] == 8000


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_measured_lengths_are_read_from_a_file(ending: str, tmp_path: Path) -> None:
    texts = {"csv": "id,length\n0,7\n1,3\n2,5\n"}
    texts["jsonl"] = "\n".join(json.dumps({"length": length}) for length in (7, 3, 5))
    file = tmp_path / f"lengths.{ending}"
    file.write_text(texts[ending])
    assert parse_lengths(str(file)).values == (3, 5, 7)


@pytest.mark.parametrize(
    "text", ["normal:mean=3", "lognormal:mean=2000", "lognormal:mean=9000,max=8000", "fixed:0"]
)
def test_a_wrong_distribution_is_an_error_with_the_setting(text: str) -> None:
    with pytest.raises(ValueError, match="--lengths is "):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["", '{"length": 0}', '{"length": 3}\n{"words": 3}', "{"])
def test_a_file_without_lengths_is_an_error_with_its_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.jsonl.*length"):
        parse_lengths(str(file))
    with pytest.raises(FileNotFoundError, match="none.csv"):
        parse_lengths(str(tmp_path / "none.csv"))


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


def work(turns: str = "fixed:3", tool_ms: str | None = None, prompts: int = 32) -> Workload:
    """Returns a step of episodes with turns of 100 tokens and answers of 10."""
    episodes = Episodes(
        turns=parse_lengths(turns),
        turn_lengths=parse_lengths("fixed:100"),
        observation_tokens=10,
        tool_ms=None if tool_ms is None else parse_lengths(tool_ms),
    )
    sizes = {"prompts": prompts, "responses": 4, "prompt_tokens": 50}
    return Workload(lengths=episodes.lengths, episodes=episodes, **sizes)


def test_an_episode_has_the_tokens_of_its_turns_and_of_the_answers_between_them() -> None:
    three = work()
    assert three.lengths.values[0] == three.lengths.longest == 3 * 100 + 2 * 10
    assert three.written_share == pytest.approx(300 / 320) and three.read_tokens == 20
    spread = Episodes(
        turns=parse_lengths("lognormal:mean=3,max=8"),
        turn_lengths=parse_lengths("lognormal:mean=100,max=500"),
        observation_tokens=10,
    )
    mean = spread.turns.mean * 100 + (spread.turns.mean - 1) * 10
    assert spread.lengths.mean == pytest.approx(mean, rel=0.03)
    assert 4 * mean < spread.lengths.longest <= 8 * 500 + 7 * 10


def test_an_episode_of_one_turn_without_tools_is_a_response() -> None:
    plain = workload("fixed:100", prompts=32, prompt_tokens=50)
    for lag in (0, 1):
        assert phase(work("fixed:1"), lag).busy_s == pytest.approx(phase(plain, lag).busy_s)
        assert phase(work("fixed:1"), lag).span_s == pytest.approx(phase(plain, lag).span_s)


def phase(of: Workload, lag: int) -> GenerationPhase:
    return steady(SHARED, of, 2, lag) if lag else drained(SHARED, of, 2)


def test_those_in_flight_are_in_the_batch_or_at_a_tool() -> None:
    none, slow = steady(SHARED, work(), 2, 1), steady(SHARED, work(tool_ms="fixed:2000"), 2, 1)
    assert none.at_tools == 0 and none.flow_s == none.busy_s
    # 128 episodes a step, and 1.5 steps' in flight, on two generators.
    batch = 192 - slow.at_tools
    rate = 128 / slow.flow_s
    assert slow.at_tools == pytest.approx(rate * 3 * 2, rel=0.01)
    assert rate == pytest.approx(2 / (300 * (8e-3 + 1e-3 * batch / 2) / (batch / 2)), rel=0.05)
    # A smaller batch gains less from batching; the generators stay busy.
    assert slow.flow_s == slow.busy_s > none.busy_s


def test_a_plan_that_tools_bind_says_so_with_the_episodes_in_flight() -> None:
    few: Any = work(tool_ms="fixed:600000", prompts=8)
    layouts, cluster = Layouts(shape(QWEN_1_5B), few), parse_cluster("8xH100")
    training, generation = layouts.training(cluster, 4), layouts.generation(cluster, 4, 4)
    assert training is not None and generation is not None
    plan = split(training, generation, 4)
    assert plan.bound == "tools" and plan.step_s > 100
    assert plan.idle(plan.generation.writing.busy_s) > 0.5
    assert "an episode waits 1.8e+03 s for its environment" in bottleneck(plan, few)
    assert "At most 160 episodes are in flight" in in_flight(plan, few)
