"""The figures of docs/results/planning.md agree with the planner."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import decode_curve, records
from benchmarks import llamarl_table as table

RESULTS = records.read(Path(__file__).parents[2] / "benchmarks/results/llamarl_table.jsonl")
PAGE = (Path(__file__).parents[2] / "docs/results/planning.md").read_text()


def test_recorded_results_agree_with_the_planner() -> None:
    now = table.record(table.ROWS[0], {})
    recorded = records.find(RESULTS, {"model": "8B", "workload": table.CHOSEN})
    assert recorded is not None
    assert now["step_s"] == pytest.approx(recorded["step_s"], rel=1e-3)
    assert now["plan"] == recorded["plan"]


def test_asynchronous_is_faster_in_every_row_and_workload() -> None:
    for row in table.ROWS:
        for change in table.CHANGES:
            found = records.find(RESULTS, {"model": row.model, "workload": table.CHOSEN | change})
            assert found is not None
            assert (
                found["step_s"]["apart"]
                < found["step_s"]["in turn"]
                <= found["step_s"]["one layout, in turn"] * 1.01
            )


def test_the_page_has_the_printed_tables() -> None:
    for line in [*table.tables(RESULTS).splitlines(), *decode_curve.table().splitlines()]:
        assert line in PAGE
