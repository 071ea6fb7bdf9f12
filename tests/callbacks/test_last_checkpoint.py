"""A run that ends badly saves whole steps, once; a resume trains the rest and nothing twice."""

from __future__ import annotations

import contextlib
import logging
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.run_without_generators import MICRO_BATCHES, STEPS_PER_EPOCH, fit, trainer

STEPS = 7


class Record(L.Callback):
    """Lightning's count at each step, and the weights after it."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []
        self.weights: dict[int, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.steps.append((trainer.current_epoch, args[-1], trainer.global_step))
        weights = [value.flatten().clone() for _, value in pl_module.whole_weights()]
        self.weights[trainer.global_step] = torch.cat(weights)


BATCH_START, BATCH_END = "on_train_batch_start", "on_train_batch_end"
BACKWARD, UPDATE = "on_before_backward", "on_before_optimizer_step"


class EndAt(L.Callback):
    """Ends a run at one call of a hook within a step: by SIGTERM, or by an error."""

    def __init__(self, step: int, hook: str, error: Exception | None = None, call: int = 1) -> None:
        self.step = step
        self.error = error
        self.calls = call
        setattr(self, hook, self._end)

    def _end(self, trainer: L.Trainer, *args: Any) -> None:
        self.calls -= trainer.global_step == self.step
        if self.calls == 0:
            self.calls = -1
            if self.error is not None:
                raise self.error
            signal.raise_signal(signal.SIGTERM)


def never() -> ModelCheckpoint:
    """A checkpoint callback that saves none within the run."""
    return ModelCheckpoint(every_n_train_steps=1000)


def saved(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/*.ckpt"))


def logged_steps(folder: Path) -> list[int]:
    lines = (folder / "csv" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("step")
    return [int(line.split(",")[column]) for line in lines[1:]]


@pytest.fixture(scope="module")
def whole(policy: str, tmp_path_factory: pytest.TempPathFactory) -> Record:
    record = Record()
    fit(policy, trainer(tmp_path_factory.mktemp("whole"), record, never(), max_steps=STEPS))
    return record


@pytest.mark.parametrize(
    "ends",
    [
        [EndAt(1, BACKWARD, call=MICRO_BATCHES), EndAt(STEPS_PER_EPOCH, "on_train_epoch_end")],
        [EndAt(1, BACKWARD), EndAt(2, UPDATE)],
        [EndAt(2, BATCH_START), EndAt(STEPS_PER_EPOCH, BACKWARD)],
        [EndAt(2, BATCH_END), EndAt(STEPS_PER_EPOCH, BATCH_END), EndAt(5, BACKWARD)],
    ],
)
def test_a_run_stopped_at_any_moment_resumes_as_if_it_had_not_stopped(
    policy: str, whole: Record, tmp_path: Path, ends: list[EndAt]
) -> None:
    records, logged, checkpoint = list[Record](), list[int](), None
    for number, end in enumerate([*ends, None]):
        folder = tmp_path / str(number)
        records.append(Record())
        logger = CSVLogger(folder, name="", version="csv")
        ending = [end] if end else []
        running = trainer(folder, records[-1], *ending, never(), logger=logger, max_steps=STEPS)
        with pytest.raises(SystemExit) if end else contextlib.nullcontext():
            fit(policy, running, checkpoint)
        logged += logged_steps(folder)
        if end:
            (checkpoint,) = saved(folder)
    assert [each for record in records for each in record.steps] == whole.steps
    assert torch.equal(records[-1].weights[STEPS], whole.weights[STEPS])
    assert logged == list(range(STEPS))


def test_an_error_of_the_run_saves_too_keeps_being_the_error_and_the_command_to_resume_is_quoted(
    policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, end = tmp_path / "the run's", EndAt(2, BACKWARD, RuntimeError("no generator is left"))
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    with pytest.raises(RuntimeError, match="no generator is left"):
        fit(policy, trainer(folder, end, never()))
    (checkpoint,) = saved(folder)
    assert checkpoint.name == "last-step=2.ckpt"
    (told,) = [message for message in caplog.messages if "Resume with" in message]
    assert shlex.split(told.partition("Resume with ")[2]) == ["--ckpt_path", str(checkpoint)]


@pytest.mark.parametrize(
    ("end", "checkpoints"),
    [
        (EndAt(0, BACKWARD), never),
        (EndAt(2, BACKWARD), lambda: ModelCheckpoint(every_n_train_steps=1)),
        (EndAt(2, BACKWARD), lambda: None),
    ],
    ids=["no step is done", "every step is saved already", "checkpoints are switched off"],
)
def test_nothing_is_saved_when(
    policy: str, tmp_path: Path, end: EndAt, checkpoints: Callable[[], ModelCheckpoint | None]
) -> None:
    saving = list(filter(None, [checkpoints()]))
    run = trainer(tmp_path, end, *saving, enable_checkpointing=bool(saving))
    with pytest.raises(SystemExit):
        fit(policy, run)
    assert not list(tmp_path.glob("**/last-*"))


def test_a_torn_optimizer_step_is_not_saved(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intact = torch.optim.AdamW.step

    def torn(self: torch.optim.AdamW, closure: Any = None) -> Any:
        found = intact(self, closure)
        if any(state["step"] == 3 for state in self.state.values()):
            raise RuntimeError("the device is lost")
        return found

    monkeypatch.setattr(torch.optim.AdamW, "step", torn)
    with pytest.raises(RuntimeError, match="the device is lost"):
        fit(policy, trainer(tmp_path, never()))
    assert not saved(tmp_path)


class InTheWay(L.Callback):
    """Puts a file in place of the checkpoint folder, so that no checkpoint can be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, *args: Any) -> None:
        self.folder.touch()


@pytest.mark.parametrize("end", [EndAt(2, BACKWARD), None], ids=["stopped", "good"])
def test_a_last_checkpoint_that_its_folder_refuses_goes_elsewhere(
    policy: str, tmp_path: Path, monkeypatch: Any, caplog: Any, end: EndAt | None
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    folder = tmp_path / "checkpoints"
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=4)
    ending = [end] if end else []
    running = trainer(tmp_path, InTheWay(folder), saving, *ending, max_steps=4)
    with pytest.raises(SystemExit) if end else contextlib.nullcontext():
        fit(policy, running)
    path = saved(tmp_path / "elsewhere")[0]
    assert torch.load(path, weights_only=True)["global_step"] == running.global_step
    assert str(path) in caplog.text
    assert "Errno" in caplog.text and str(folder) in caplog.text
