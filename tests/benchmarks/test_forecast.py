"""Forecast against fact, where the fact is a simulation itself."""

from __future__ import annotations

import pytest

from benchmarks import forecast
from lrl.planning.costs import LinearGenerator, LinearTrainer
from lrl.rollouts.timeline import Record

GENERATOR = LinearGenerator(
    kv_tokens=40_000, step_s=0.013, response_s=3e-4, prefill_token_s=4e-3, pause_s=0.1
)
TRAINER = LinearTrainer(
    micro_batch_fixed_s=0.05, token_s=8e-4, token_squared_s=1e-6, optimizer_s=0.1, weights_s=0.4
)
ARGS = forecast.make_parser().parse_args(["--steps", "8", "--warmup", "2"])
RUNS = {run["run"]: run for run in forecast.runs(ARGS)}


def timeline(name: str) -> list[Record]:
    records = list[Record]()
    forecast.simulation(RUNS[name], GENERATOR, TRAINER, prompt_tokens=35).run(records.append)
    return records


def test_where_the_simulator_is_right_every_forecast_is_the_fact() -> None:
    fitted = timeline(forecast.FITTED)
    rows = [forecast.compare(run, timeline(name), fitted) for name, run in RUNS.items()]
    assert all(row["same_responses"] for row in rows)
    for row in rows:
        assert forecast.error(row) == pytest.approx(0, abs=0.02)
        parts = sum(row["fact"][part] for of in forecast.GROUPED.values() for part in of)
        # Medians of parts do not add up exactly.
        assert parts == pytest.approx(row["fact"]["seconds"], rel=0.25)
    lines = forecast.table(rows).splitlines()
    assert len(lines) == 2 + len(rows) and "| B | lag 3 |" in lines[3] and "0%" in lines[3]
