"""A run's folder is its own, and locked while the run lives; the metrics that are in it stay."""

from __future__ import annotations

import csv
import os
import secrets
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lrl.checkpoints.run_folder import continue_logs, lock, lock_run_folder, run_folder
from tests.run_without_generators import trainer


def test_a_live_runs_folder_is_an_error(tmp_path: Path) -> None:
    first = lock(tmp_path / "run")
    with pytest.raises(ValueError, match="is that of a live run"):
        lock(tmp_path / "run")
    another = lock(tmp_path / "another")
    os.close(first)
    for opened in (lock(tmp_path / "run"), another):
        os.close(opened)


def test_of_runs_that_begin_at_once_each_has_a_folder_of_its_own(tmp_path: Path) -> None:
    begun: list[Path] = []
    opened: list[int] = []

    class Overtaken(TensorBoardLogger):
        """Between its number and its folder another run takes both."""

        def _get_next_version(self) -> int:
            number = super()._get_next_version()
            if not begun:
                other = trainer(tmp_path, logger=TensorBoardLogger(tmp_path))
                opened.append(lock_run_folder(other))
                begun.append(run_folder(other))
            return number

    running = trainer(tmp_path, logger=[Overtaken(tmp_path), CSVLogger(tmp_path)])
    opened.append(lock_run_folder(running))
    runs = tmp_path / "lightning_logs"
    assert begun == [runs / "version_0"] and run_folder(running) == runs / "version_1"
    assert running.loggers[1].log_dir == str(runs / "version_1"), "one number for both loggers"
    for folder in runs.iterdir():
        with pytest.raises(ValueError, match="live run"):
            lock(folder)
    for one in opened:
        os.close(one)


def test_a_logger_that_numbers_no_folder_is_not_asked_for_ever(tmp_path: Path) -> None:
    class Plain(CSVLogger):
        @property
        def log_dir(self) -> str:
            return str(tmp_path / "plain")

    opened = lock_run_folder(trainer(tmp_path, logger=Plain(tmp_path)))
    with pytest.raises(ValueError, match="live run"):
        lock_run_folder(trainer(tmp_path, logger=Plain(tmp_path)))
    os.close(opened)


class Tracker(Logger):
    """Names its runs as W&B and MLflow do: by itself, when a run begins."""

    name = "sums"
    version = None

    def __init__(self, save_dir: Path) -> None:
        super().__init__()
        self.folder = save_dir

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @property
    def experiment(self) -> object:
        self.version = self.version or secrets.token_hex(4)
        return self

    def log_metrics(self, *args: Any, **kwargs: Any) -> None: ...

    def log_hyperparams(self, *args: Any) -> None: ...


def test_each_run_of_a_logger_with_one_folder_for_all_has_its_own(tmp_path: Path) -> None:
    one, other = (
        run_folder(trainer(tmp_path, logger=Tracker(tmp_path / "runs"))) for _ in range(2)
    )
    assert one != other and one.parent == other.parent == tmp_path / "runs/sums"


RUN = "version_0"


def loggers(folder: Path) -> list[Any]:
    return [CSVLogger(folder, "", RUN), TensorBoardLogger(folder, "", RUN)]


def log(used: list[Any], steps: range, **values: float) -> None:
    for logger in used:
        for step in steps:
            logger.log_metrics(values, step)
        logger.finalize("success")


def continued(used: list[Any], step: int) -> list[Any]:
    continue_logs(L.Trainer(logger=used, accelerator="cpu"), step)
    return used


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / RUN / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curve(folder: Path) -> list[tuple[int, float]]:
    scalars = EventAccumulator(str(folder / RUN)).Reload().Scalars("part")
    found = [(event.step, event.value) for event in scalars]
    in_csv = [(int(row["step"]), float(row["part"])) for row in rows(folder) if row["part"]]
    assert in_csv == found
    return found


def test_a_resumed_run_keeps_the_steps_before_its_checkpoint_and_has_the_others_once(
    tmp_path: Path,
) -> None:
    log(loggers(tmp_path), range(5), part=1, early=7)
    used = continued(loggers(tmp_path), 3)
    assert len(rows(tmp_path)) == 3, "also if the run is killed now"
    log(used, range(3, 6), part=2, late=8)
    assert curve(tmp_path) == [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert [row["early"] for row in rows(tmp_path)] == ["7"] * 3 + [""] * 3


def test_what_trains_no_step_again_keeps_all_of_a_folder(tmp_path: Path) -> None:
    """A new run in the folder of another one, and an evaluation of a checkpoint."""
    log(loggers(tmp_path), range(3), part=1)
    log(continued(loggers(tmp_path), -1), range(1), accuracy=1)
    assert curve(tmp_path) == [(0, 1), (1, 1), (2, 1)] and len(rows(tmp_path)) == 4


@pytest.mark.parametrize("end", ["", "0", "0,1", '"'])
def test_a_line_that_was_cut_short_costs_no_other(tmp_path: Path, end: str) -> None:
    log(loggers(tmp_path), range(3), part=1, zeta=1)
    with (tmp_path / RUN / "metrics.csv").open("a") as file:
        file.write(end)
    continued(loggers(tmp_path), 2)
    assert [row["step"] for row in rows(tmp_path)] == ["0", "1"]
