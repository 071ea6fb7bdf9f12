"""Drawn lengths, and what the tables of step times compare."""

from __future__ import annotations

from benchmarks import overlap, timed_run
from benchmarks.against_trl import speed
from benchmarks.forced_lengths import Before, equal, long_tailed
from benchmarks.skewness import Oracle, ratios, table
from benchmarks.timed_run import Timed
from lrl.types import Prompt


def test_drawn_lengths_have_the_stated_mean_and_maximum() -> None:
    drawn = [length for group in range(400) for length in long_tailed().of(group, group, 16)]
    assert 62 < sum(drawn) / len(drawn) < 66 and max(drawn) == 512
    assert set(equal().of(3, 3, 16)) == {64}


def took(seconds: float) -> dict[str, list[float]]:
    return {
        "step": [seconds - 0.1, seconds, seconds + 0.1],
        "wait": [0.0] * 3,
        "sync": [0.1] * 3,
        "sync_pause": [0.0] * 3,
        "on_core": [seconds] * 3,
    }


def test_overlap_is_compared_with_the_slower_side() -> None:
    step = {
        "asynchronous": took(3.3),
        "writing": took(1.0),
        "training": took(3.0),
        "synchronous": took(6.6),
    }
    found = overlap.table([{"system": n, "lengths": "equal", **row} for n, row in step.items()])
    assert "1.10 times the larger of both alone" in found
    assert "2.00 times as fast as lrl's synchronous one" in found


def test_lrl_is_compared_with_the_faster_of_trls_ways() -> None:
    speeds = {"trl": 20.0, "trl-pieces": 25.0, "split": 30.0, "trainer-all": 40.0}
    parts = {part: [1.0, 1.0, 1.0] for part in speed.PARTS}
    shared = {"lengths": "equal", "trl": "1"} | parts
    rows = [shared | {"system": name, "answers_per_s": value} for name, value in speeds.items()]
    found = speed.table(rows)
    assert "trains 1.60 times TRL's responses" in found and "TRL 1, in pieces" in found


def test_a_mean_counts_the_step_that_waited() -> None:
    found = timed_run.means([Timed({"train": 1.0}), Timed({"train": 1.0, "wait_last": 3.0})])
    assert found["step"] == 2.5 and found["wait"] == 1.5 and found["train"] == 1.0


def test_an_oracle_expects_the_drawn_responses() -> None:
    lengths = long_tailed(seed=3, prompt_share=0.5)
    oracle = Oracle(lengths, prompts=64, responses=4)
    for prompt in range(64):
        drawn = lengths.of(prompt, prompt, 4)
        assert oracle.expected(Prompt(id=prompt, token_ids=[1], text="")) == sum(drawn) / 4
    assert oracle.quantile(1.0) == max(max(lengths.of(prompt, prompt, 4)) for prompt in range(64))


def test_an_epoch_before_has_other_responses_to_the_same_prompts() -> None:
    alike, mixed = long_tailed(prompt_share=1.0), long_tailed(prompt_share=0.5)
    assert Before(alike).of(7, 7, 4) == alike.of(7, 7, 4)
    assert Before(mixed).of(7, 7, 4) != mixed.of(7, 7, 4)


def test_a_case_is_compared_with_the_first_one_of_the_same_repeat() -> None:
    times = {"step_ms": 10.0, "response_ms": 0.5, "alone_ms": 10.0, "longest": [100, 300]}

    def row(case: str, repeat: int, *seconds: float) -> dict:
        return {"case": case, "repeat": repeat, "seconds": list(seconds)} | times

    first = [row("RoundRobin:nothing", 0, 4.0, 6.0), row("RoundRobin:nothing", 1, 10.0, 10.0)]
    rows = [
        *first,
        row("SkewnessAware:oracle", 0, 4.0, 4.0),
        row("SkewnessAware:oracle", 1, 5.0, 5.0),
    ]
    assert ratios(rows, "SkewnessAware:oracle") == [0.8, 0.5]
    assert "| the longest group alone | 2.00 |  |" in table(rows)
