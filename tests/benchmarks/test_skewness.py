"""The benchmarks of dispatch: what rules are told, what is compared with what."""

import argparse
from typing import Any

import pytest

from benchmarks import simulated_skewness, skewness
from benchmarks.forced_lengths import Before, long_tailed
from benchmarks.oracle import Oracle
from benchmarks.simulated_skewness import case_s, told
from benchmarks.simulated_table3 import SCENES, simulate
from benchmarks.skewness_report import newest, ratios, table
from benchmarks.streamrl_setup import MODELS
from lrl.planning.planner.devices import parse_cluster
from lrl.types import Prompt


def test_an_oracle_expects_the_drawn_responses() -> None:
    lengths = long_tailed(seed=3, prompt_share=0.5)
    oracle = Oracle(lengths, prompts=64, responses=4)
    for prompt in range(64):
        drawn = lengths.of(prompt, prompt, 4)
        assert oracle.expected(Prompt(id=prompt, token_ids=[1], text="")) == sum(drawn) / 4
    assert oracle.quantile(1.0) == max(max(lengths.of(prompt, prompt, 4)) for prompt in range(64))
    assert oracle.recall(0.2) == 1.0


def test_the_ranker_finds_the_longest_as_often_as_the_papers() -> None:
    found = [told("ranker", 20_000, seed).recall(0.2) for seed in range(8)]
    assert sum(found) / len(found) == pytest.approx(0.87, abs=0.01)


def test_an_epoch_before_has_other_responses_to_the_same_prompts() -> None:
    alike, mixed = long_tailed(prompt_share=1.0), long_tailed(prompt_share=0.5)
    assert Before(alike).of(7, 7, 4) == alike.of(7, 7, 4)
    assert Before(mixed).of(7, 7, 4) != mixed.of(7, 7, 4)


def test_separate_generators_for_the_long_responses_beat_random_fifo() -> None:
    model = MODELS["32B"]
    by_chance, apart = (
        case_s(model, case, 5000, 0) for case in ("Random:nothing", "SkewnessAware:oracle")
    )
    assert apart < 0.97 * by_chance


def test_each_part_of_table_3_adds_to_the_throughput() -> None:
    args = argparse.Namespace(generation=80, passes=6.2, contexts=True, steps=4, seed=0)
    seconds = [simulate(scene, parse_cluster("128xH800"), args)["step_s"] for scene in SCENES]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("benchmark", [skewness, simulated_skewness])
@pytest.mark.parametrize("case", ["Fastest:oracle", "LeastTokens", "SkewnessAware:nothing"])
def test_an_unknown_case_is_refused_with_the_known_ones(
    benchmark: Any, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(["--cases", case])
    message = capsys.readouterr().err
    assert f"argument --cases: invalid choice: '{case}'" in message
    assert all(known in message for known in benchmark.KNOWN)


def test_a_case_is_compared_with_the_first_one_of_the_same_repeat() -> None:
    def row(case: str, repeat: int, *seconds: float) -> dict:
        facts = {"case": case, "repeat": repeat, "seconds": list(seconds)}
        return facts | {
            "step_ms": 10.0,
            "response_ms": 0.5,
            "alone_ms": 10.0,
            "longest": [100, 300],
        }

    first = [row("RoundRobin:nothing", 0, 4.0, 6.0), row("RoundRobin:nothing", 1, 10.0, 10.0)]
    rows = [
        *first,
        row("SkewnessAware:oracle", 0, 4.0, 4.0),
        row("SkewnessAware:oracle", 1, 5.0, 5.0),
    ]
    assert ratios(rows, "SkewnessAware:oracle") == [0.8, 0.5]
    assert "| the longest group alone | 2.00 | |" in table(rows)


def test_a_later_measurement_of_a_repeat_replaces_the_earlier_one_in_the_whole_table() -> None:
    shared = {"case": "RoundRobin:nothing", "repeat": 0, "longest": [1000]}
    slow = shared | {"seconds": [9.0], "alone_ms": 9.0, "step_ms": 9.0, "response_ms": 0.9}
    fast = shared | {"seconds": [2.0], "alone_ms": 1.0, "step_ms": 5.0, "response_ms": 0.5}
    text = table(newest([slow, fast]))
    assert "| 2.00 (2.00 to 2.00) |" in text
    assert "| the longest group alone | 1.00 | |" in text
    assert text.endswith("decode_latency: 5.00 ms and 0.500 ms for each response")
