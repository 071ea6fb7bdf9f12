"""In a folder that has logs already a run keeps them, and no step that it trains again is there
twice."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lrl.checkpoints.continued_logs import continue_logs

RUN = "version_0"
Rows = list[dict[str, str]]


def loggers(folder: Path) -> list[Any]:
    return [CSVLogger(folder, "", RUN), TensorBoardLogger(folder, "", RUN)]


def log(folder: Path, steps: range, part: float, **more: float) -> None:
    for logger in loggers(folder):
        for step in steps:
            logger.log_metrics({"part": part, **more}, step)
        logger.finalize("success")


def continued(folder: Path, step: int, used: list[Any] | None = None) -> list[Any]:
    used = used or loggers(folder)
    continue_logs(L.Trainer(logger=used, accelerator="cpu"), step)
    return used


def rows(folder: Path) -> Rows:
    with (folder / RUN / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curve(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / RUN)).Reload().Scalars("part")
    return [(event.step, event.value) for event in events]


def test_a_resumed_run_keeps_the_steps_before_its_checkpoint_and_has_the_others_once(
    tmp_path: Path,
) -> None:
    log(tmp_path, range(5), 1, early=7)
    used = continued(tmp_path, 3)
    assert len(rows(tmp_path)) == 3, "also if the run is killed now"
    for logger in used:
        for step in range(3, 6):
            logger.log_metrics({"part": 2, "late": 8}, step)
        logger.finalize("success")
    expected = [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert curve(tmp_path) == expected
    assert [(int(row["step"]), float(row["part"])) for row in rows(tmp_path)] == expected
    assert [row["early"] for row in rows(tmp_path)] == ["7"] * 3 + [""] * 3


def test_a_second_fit_of_one_trainer_that_goes_back_has_each_step_once(tmp_path: Path) -> None:
    used = loggers(tmp_path)
    for part, first in ((1, 0), (2, 2)):
        for logger in continued(tmp_path, first, used) if part == 2 else used:
            for step in range(first, 4):
                logger.log_metrics({"part": part}, step)
            logger.finalize("success")
    assert curve(tmp_path) == [(0, 1), (1, 1), (2, 2), (3, 2)]
    assert [float(row["part"]) for row in rows(tmp_path)] == [1, 1, 2, 2]


def test_what_trains_no_step_again_keeps_all_of_a_folder(tmp_path: Path) -> None:
    """A new run in the folder of another one, and an evaluation of a checkpoint."""
    log(tmp_path, range(3), 1)
    for logger in continued(tmp_path, -1):
        logger.log_metrics({"accuracy": 1}, 0)
        logger.finalize("success")
    assert [row["part"] for row in rows(tmp_path)] == ["1", "1", "1", ""]
    assert curve(tmp_path) == [(0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize("end", ["", "0", "0,1", '"'])
def test_a_line_that_was_cut_short_costs_no_other(tmp_path: Path, end: str) -> None:
    log(tmp_path, range(3), 1, zeta=1)
    with (tmp_path / RUN / "metrics.csv").open("a") as file:
        file.write(end)
    continued(tmp_path, 2)
    assert [row["step"] for row in rows(tmp_path)] == ["0", "1"]


def test_a_new_folder_stays_one(tmp_path: Path) -> None:
    for logger in continued(tmp_path, 4):
        logger.log_metrics({"part": 1}, 4)
        logger.finalize("success")
    assert curve(tmp_path) == [(4, 1)] and len(rows(tmp_path)) == 1
