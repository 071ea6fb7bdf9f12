"""What the benchmarks compute: intervals, drawn lengths, means, ratios, forecasts."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from benchmarks import forecast, overlap
from benchmarks.against_trl import speed
from benchmarks.forced_lengths import long_tailed
from benchmarks.lag_sweep import lag_cell
from benchmarks.records import accuracy_interval
from benchmarks.skewness import OTHERS, Oracle
from lrl.evaluation import wilson_interval
from lrl.planning.costs import LinearGenerator, LinearTrainer
from lrl.rollouts.timeline import Record
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


def test_where_the_simulator_is_right_every_forecast_is_the_fact() -> None:
    generator = LinearGenerator(
        kv_tokens=40_000, step_s=0.013, response_s=3e-4, prefill_token_s=4e-3, sync_pause_s=0.1
    )
    trainer = LinearTrainer(
        micro_batch_fixed_s=0.05, token_s=8e-4, token_squared_s=1e-6, update_s=0.1, sync_s=0.4
    )
    usual = {name: default for name, (default, *_) in forecast.SETTINGS.items()}
    runs = list(forecast.runs(Namespace(**usual | {"steps": 8, "warmup": 2})))

    def timeline(run: dict[str, Any]) -> list[Record]:
        records = list[Record]()
        forecast.simulation(run, generator, trainer, prompt_tokens=35).run(records.append)
        return records

    (fitted,) = (timeline(run) for run in runs if run["run"] == forecast.FITTED)
    for row in (forecast.compare(run, timeline(run), fitted) for run in runs):
        assert row["same_responses"]
        assert forecast.error(row) == pytest.approx(0, abs=0.02)
        parts = sum(row["fact"][part] for of in forecast.GROUPED.values() for part in of)
        # Medians of parts do not add up exactly.
        assert parts == pytest.approx(row["fact"]["seconds"], rel=0.25)
