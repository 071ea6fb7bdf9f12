"""The last page of a run: the curve in a line, and where each logger has its metrics."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lrl.callbacks import RolloutLog
from lrl.callbacks.summary import BARS, HEIGHTS, curve_in_a_line, where_metrics_are


@given(st.lists(st.integers(-40, 40).map(lambda number: number / 8), min_size=1, max_size=200))
def test_a_curve_in_a_line_reaches_from_the_lowest_to_the_highest_bar(values: list[float]) -> None:
    bars, _, numbers = curve_in_a_line(values).partition("  ")
    assert len(bars) == min(len(values), BARS) and set(bars) <= set(HEIGHTS)
    if len(values) <= BARS:
        assert numbers == f"{values[0]:.3f} to {values[-1]:.3f}"
        assert bars[values.index(min(values))] == HEIGHTS[0]
        if max(values) > min(values):
            assert bars[values.index(max(values))] == HEIGHTS[-1]


@pytest.mark.parametrize("charts", [True, False])
def test_each_logger_says_where_its_metrics_are(tmp_path: Path, charts: bool) -> None:
    loggers = [TensorBoardLogger(tmp_path / "a b"), CSVLogger(tmp_path / "c")]
    trainer = L.Trainer(logger=loggers, callbacks=[RolloutLog()] * charts, accelerator="cpu")
    lines = where_metrics_are(trainer)
    assert lines[0].split(maxsplit=1)[1] == f"tensorboard --logdir '{loggers[0].log_dir}'"
    assert len(lines) == 2 + charts
    assert lines[-1].split() == ["metrics", f"{loggers[1].log_dir}/metrics.csv"]
