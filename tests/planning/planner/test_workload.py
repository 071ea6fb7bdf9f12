"""Distributions of response lengths, and the time of a step's generation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.planner.batching import drained, slots_of, steady
from lrl.planning.planner.workload import Quantiles, Workload, parse_lengths

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


def test_an_unfinished_response_is_half_written_and_long_ones_count_more() -> None:
    assert parse_lengths("fixed:512").written == 256
    assert parse_lengths(LOGNORMAL).written > 1000


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_measured_lengths_are_read_from_a_file(ending: str, tmp_path: Path) -> None:
    rows = [7, 3, 5]
    text = (
        "\n".join(json.dumps({"length": n}) for n in rows)
        if ending == "jsonl"
        else "id,length\n0,7\n1,3\n2,5\n"
    )
    file = tmp_path / f"lengths.{ending}"
    file.write_text(text)
    assert parse_lengths(str(file)).values == (3, 5, 7)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "normal:mean=3",
        "lognormal:mean=2000",
        "lognormal:mean=9000,max=8000",
        "lognormal:mean=20,max=80,sigma=0",
        "lognormal:mean=20,max=80,mode=3",
        "lognormal:mean=x,max=80",
        "fixed:0",
        "fixed:nan",
        "fixed:",
    ],
)
def test_a_wrong_distribution_is_an_error_with_the_setting(text: str) -> None:
    with pytest.raises(ValueError, match="--lengths is "):
        parse_lengths(text)


@pytest.mark.parametrize(
    "text", ["", '{"words": 3}', '{"length": 0}', '{"length": 3}\n{"words": 3}', "[3]", "{"]
)
def test_a_file_without_lengths_is_an_error_with_its_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.jsonl.*length"):
        parse_lengths(str(file))
    with pytest.raises(FileNotFoundError, match="none.csv"):
        parse_lengths(str(tmp_path / "none.csv"))


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


@pytest.mark.parametrize("name", ["prompts", "responses", "prompt_tokens"])
def test_an_empty_workload_is_an_error_with_the_setting(name: str) -> None:
    sizes = {"prompts": 1, "responses": 1, "prompt_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is 0"):
        Workload(**sizes, lengths=parse_lengths("fixed:5"))
