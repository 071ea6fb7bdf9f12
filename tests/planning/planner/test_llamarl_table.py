"""The figures of docs/planning.md: still what the planner says, and whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import decode_curve, records
from benchmarks import llamarl_table as table

RESULTS = records.read(Path(__file__).parents[3] / "benchmarks/results/llamarl_table.jsonl")
PAGE = (Path(__file__).parents[3] / "docs/results/planning.md").read_text()


def test_what_is_recorded_is_what_the_planner_says_today() -> None:
    now = table.record(table.ROWS[0], {})
    recorded = records.find(RESULTS, {"model": "8B", "workload": table.CHOSEN})
    assert recorded is not None
    assert now["step_s"] == pytest.approx(recorded["step_s"], rel=1e-3)
    assert now["plan"] == recorded["plan"]


def test_every_row_has_every_workload_and_asynchronous_is_the_faster_in_each() -> None:
    for row in table.ROWS:
        for change in table.CHANGES:
            found = records.find(RESULTS, {"model": row.model, "workload": table.CHOSEN | change})
            assert found is not None
            assert (
                found["step_s"]["apart"] < found["step_s"]["in turn"] <= found["step_s"]["one layout, in turn"] * 1.01
            )


def test_the_page_has_the_tables_as_they_are_printed() -> None:
    for line in [*table.tables(RESULTS).splitlines(), *decode_curve.table().splitlines()]:
        assert line in PAGE
