"""Distributions of response lengths, and how long a generator takes for a step's responses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.lengths import Quantiles, parse_lengths
from lrl.planning.planner.batching import drained, slots_of, steady
from lrl.planning.planner.workload import Workload

LOGNORMAL = "lognormal:mean=2000,max=8000"


@dataclass(frozen=True)
class Flat:
    """A generator that takes a millisecond a token, whatever its batch."""

    kv_tokens: int = 10**9

    def decode_s(self, responses: int, context_tokens: int) -> float:
        assert responses > 0 and context_tokens >= 0
        return 1e-3

    def prefill_s(self, tokens: int) -> float:
        return 0.0

    def sync_pause_s(self) -> float:
        return 0.0


class Linear(Flat):
    """A generator whose token takes as much longer as its batch is larger: batching wins nothing."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        return 1e-3 * responses


class Shared(Flat):
    """A generator whose token takes longer with each response, and less for each of many."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        return 8e-3 + 1e-3 * responses


class Held(Flat):
    """A generator whose seconds are the tokens it holds."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        return float(context_tokens)


def workload(lengths: str | Quantiles, prompts: int = 8, responses: int = 4, prompt_tokens: int = 100) -> Workload:
    found = parse_lengths(lengths) if isinstance(lengths, str) else lengths
    return Workload(prompts=prompts, responses=responses, prompt_tokens=prompt_tokens, lengths=found)


@settings(deadline=None)
@given(st.floats(2, 5000), st.floats(1.05, 50), st.floats(0.05, 2.5))
def test_a_lognormal_has_the_mean_it_is_given_after_the_cut(mean: float, times: float, sigma: float) -> None:
    lengths = parse_lengths(f"lognormal:mean={mean},max={mean * times},sigma={sigma}")
    assert lengths.mean == pytest.approx(mean, rel=1e-3)
    assert lengths.longest <= mean * times and min(lengths.values) >= 1


def test_lengths_of_a_step_are_the_distributions_own_and_the_longest_grows_with_their_number() -> None:
    lengths = parse_lengths(LOGNORMAL)
    assert np.mean(lengths.of(2048)) == pytest.approx(lengths.mean, rel=0.01)
    assert lengths.of(4)[-1] < lengths.of(64)[-1] <= lengths.of(4096)[-1] == 8000


def test_an_answer_that_is_looked_at_is_half_written_and_likelier_a_long_one() -> None:
    assert parse_lengths("fixed:512").written == 256
    assert parse_lengths(LOGNORMAL).written > 1000


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_measured_lengths_are_read_from_a_file(ending: str, tmp_path: Path) -> None:
    rows = [7, 3, 5]
    text = "\n".join(json.dumps({"length": n}) for n in rows) if ending == "jsonl" else "id,length\n0,7\n1,3\n2,5\n"
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
def test_a_wrong_distribution_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(ValueError, match="--lengths is "):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["", '{"words": 3}', '{"length": 0}', '{"length": 3}\n{"words": 3}', "[3]", "{"])
def test_a_file_without_lengths_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.jsonl.*length"):
        parse_lengths(str(file))
    with pytest.raises(FileNotFoundError, match="none.csv"):
        parse_lengths(str(tmp_path / "none.csv"))


def test_with_room_for_all_a_drain_ends_with_the_longest_answer_of_the_fleet() -> None:
    for generators in (1, 4):
        assert drained(Flat(), workload(LOGNORMAL), generators).span_s == pytest.approx(
            1e-3 * parse_lengths(LOGNORMAL).of(32)[-1]
        )


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 400), st.integers(1, 8))
def test_where_batching_wins_nothing_a_drain_takes_the_tokens_one_after_the_other(
    prompts: int, generators: int
) -> None:
    work = workload("fixed:50", prompts=prompts)
    share = -(-work.samples // generators)
    assert drained(Linear(), work, generators).busy_s == pytest.approx(50e-3 * share, rel=0.02)


def test_a_drain_adds_up_every_token_that_is_held_while_it_is_written() -> None:
    work = workload("fixed:10", prompts=1, responses=2, prompt_tokens=100)
    assert drained(Held(), work, 1).busy_s == 2 * (100 + 5) * 10


def test_without_room_answers_take_turns() -> None:
    work = workload("fixed:100", prompts=4, responses=4, prompt_tokens=50)
    room_for_four = Flat(kv_tokens=int(4 * work.live_tokens))
    assert slots_of(room_for_four, work) == 4
    assert drained(room_for_four, work, 1).span_s == pytest.approx(4 * 0.1)
    assert slots_of(Flat(kv_tokens=work.longest - 1), work) == 0


def test_a_steady_flow_hides_the_tail_that_a_drain_waits_for() -> None:
    work = workload(LOGNORMAL, prompts=64)
    flowing, draining = steady(Flat(), work, 2, lag=1), drained(Flat(), work, 2)
    assert flowing.busy_s < draining.busy_s / 2
    assert flowing.span_s == pytest.approx(draining.span_s)


def test_in_a_flow_with_little_room_fewer_answers_are_written_at_once_and_a_step_takes_longer() -> None:
    work = workload(LOGNORMAL, prompts=64)
    tight, ample = (steady(Flat(kv_tokens=tokens), work, 2, lag=1) for tokens in (20_000, 10**9))
    assert tight.slots < ample.slots and tight.busy_s > ample.busy_s


def test_in_a_flow_as_many_share_a_generator_as_the_bound_on_lag_lets_the_longest_answer() -> None:
    work = workload(LOGNORMAL, prompts=64)
    spans = [steady(Shared(), work, 2, lag).span_s for lag in (1, 2, 4)]
    longest = parse_lengths(LOGNORMAL).of(work.samples)[-1]
    alone, crowded = 8e-3 * longest, (8e-3 + 1e-3 * 1.5 * work.samples / 2) * longest
    assert alone < spans[0] < spans[1] < spans[2]  # more lag, more of them
    assert spans[0] < crowded / 2  # with all that pacing lets in, the longest would end too late


def test_training_ends_no_sooner_than_its_work_and_its_last_group_let_it() -> None:
    work = workload(LOGNORMAL, prompts=64)
    writing = drained(Flat(), work, 2)
    assert writing.trained_s(0.0, 0.5) == pytest.approx(writing.span_s + 0.5)
    first = writing.group_ends_s[0]
    assert writing.trained_s(1000.0, 0.5) == pytest.approx(first + 1000.0, rel=0.01)
    assert list(writing.group_ends_s) == sorted(writing.group_ends_s)
    of_one = drained(Flat(), workload(LOGNORMAL, prompts=256, responses=1), 2)
    assert writing.group_ends_s[16] > of_one.group_ends_s[16]  # a group waits for the longest of its four


@pytest.mark.parametrize("name", ["prompts", "responses", "prompt_tokens"])
def test_a_workload_without_work_is_an_error_that_names_the_setting(name: str) -> None:
    sizes = {"prompts": 1, "responses": 1, "prompt_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is 0"):
        Workload(**sizes, lengths=parse_lengths("fixed:5"))
