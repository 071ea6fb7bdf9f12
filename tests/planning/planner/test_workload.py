"""The work of a step, and the time of its generation.

Covers lrl/planning/planner/batching.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.planner.batching import drained, slots_of, steady
from lrl.planning.planner.quantiles import Quantiles, parse_lengths
from lrl.planning.planner.workload import Workload
from lrl.training.prefix_tree import prefix_trees
from tests.training.test_prefix_tree import drawn

LOGNORMAL = "lognormal:mean=2000,max=8000"


@dataclass(frozen=True)
class Flat:
    """A generator with a millisecond a token at every batch size."""

    kv_tokens: int = 10**9

    def decode_s(self, responses: int, context_tokens: int) -> float:
        assert responses > 0 and context_tokens >= 0
        return 1e-3

    def prefill_s(self, tokens: int) -> float:
        return 0.0

    def sync_pause_s(self) -> float:
        return 0.0


class Linear(Flat):
    """A generator with a time per token proportional to its batch: batching gains nothing."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        return 1e-3 * responses


class Shared(Flat):
    """A generator with a time per token linear in its batch: batching gains."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        return 8e-3 + 1e-3 * responses


class Held(Flat):
    """A generator with a decode time equal to its context tokens."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        return float(context_tokens)


def workload(
    lengths: str | Quantiles, prompts: int = 8, responses: int = 4, prompt_tokens: int = 100
) -> Workload:
    found = parse_lengths(lengths) if isinstance(lengths, str) else lengths
    return Workload(
        prompts=prompts, responses=responses, prompt_tokens=prompt_tokens, lengths=found
    )


def test_with_room_for_all_a_drain_ends_with_the_longest_response() -> None:
    for generators in (1, 4):
        assert drained(Flat(), workload(LOGNORMAL), generators).span_s == pytest.approx(
            1e-3 * parse_lengths(LOGNORMAL).of(32)[-1]
        )


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 400), st.integers(1, 8))
def test_without_gain_from_batching_a_drain_takes_the_sum_of_its_tokens(
    prompts: int, generators: int
) -> None:
    work = workload("fixed:50", prompts=prompts)
    share = -(-work.samples // generators)
    assert drained(Linear(), work, generators).busy_s == pytest.approx(50e-3 * share, rel=0.02)


def test_a_drain_adds_up_all_context_tokens() -> None:
    work = workload("fixed:10", prompts=1, responses=2, prompt_tokens=100)
    assert drained(Held(), work, 1).busy_s == 2 * (100 + 5) * 10


def test_without_room_responses_take_turns() -> None:
    work = workload("fixed:100", prompts=4, responses=4, prompt_tokens=50)
    room_for_four = Flat(kv_tokens=int(4 * work.live_tokens))
    assert slots_of(room_for_four, work) == 4
    assert drained(room_for_four, work, 1).span_s == pytest.approx(4 * 0.1)
    assert slots_of(Flat(kv_tokens=work.longest - 1), work) == 0


def test_a_steady_flow_hides_the_tail_of_a_drain() -> None:
    work = workload(LOGNORMAL, prompts=64)
    flowing, draining = steady(Flat(), work, 2, lag=1), drained(Flat(), work, 2)
    assert flowing.busy_s < draining.busy_s / 2
    assert flowing.span_s == pytest.approx(draining.span_s)


def test_less_room_means_smaller_batches_and_longer_steps() -> None:
    work = workload(LOGNORMAL, prompts=64)
    tight, ample = (steady(Flat(kv_tokens=tokens), work, 2, lag=1) for tokens in (20_000, 10**9))
    assert tight.slots < ample.slots and tight.busy_s > ample.busy_s


def test_the_bound_on_lag_limits_the_batch_of_a_steady_flow() -> None:
    work = workload(LOGNORMAL, prompts=64)
    spans = [steady(Shared(), work, 2, lag).span_s for lag in (1, 2, 4)]
    longest = parse_lengths(LOGNORMAL).of(work.samples)[-1]
    alone, crowded = 8e-3 * longest, (8e-3 + 1e-3 * 1.5 * work.samples / 2) * longest
    assert alone < spans[0] < spans[1] < spans[2]  # more lag, larger batches
    # With every response that pacing admits, the longest would end too late.
    assert spans[0] < crowded / 2


def test_training_ends_after_its_work_and_after_its_last_group() -> None:
    work = workload(LOGNORMAL, prompts=64)
    writing = drained(Flat(), work, 2)
    assert writing.trained_s(0.0, 0.5) == pytest.approx(writing.span_s + 0.5)
    first = writing.group_ends_s[0]
    assert writing.trained_s(1000.0, 0.5) == pytest.approx(first + 1000.0, rel=0.01)
    assert list(writing.group_ends_s) == sorted(writing.group_ends_s)
    of_one = drained(Flat(), workload(LOGNORMAL, prompts=256, responses=1), 2)
    # A group waits for the longest of its four.
    assert writing.group_ends_s[16] > of_one.group_ends_s[16]


@pytest.mark.parametrize("prompt_tokens", [1, 75, 600])
@pytest.mark.parametrize("attention_tokens", [0, 3456])
def test_the_tokens_to_train_are_those_that_are_packed(
    prompt_tokens: int, attention_tokens: int
) -> None:
    work = Workload(
        prompts=3,
        responses=8,
        prompt_tokens=prompt_tokens,
        lengths=parse_lengths("fixed:40"),
        attention_tokens=attention_tokens,
    )
    samples = drawn(0, prompt_tokens, 0, [40] * 8)
    trees = prefix_trees(samples, longest=100_000, attention_tokens=attention_tokens)
    assert (len(trees) < 8) == (attention_tokens > 0 and prompt_tokens > 1)
    assert work.trees == len(trees)
    assert work.tokens == 3 * sum(map(len, trees))
    squared = 3 * sum(len(tree) ** 2 for tree in trees)
    assert work.tokens_squared == pytest.approx(squared, rel=0.01)


@pytest.mark.parametrize("name", ["prompts", "responses", "prompt_tokens"])
def test_an_empty_workload_is_an_error_with_the_setting(name: str) -> None:
    sizes = {"prompts": 1, "responses": 1, "prompt_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is 0"):
        Workload(**sizes, lengths=parse_lengths("fixed:5"))
