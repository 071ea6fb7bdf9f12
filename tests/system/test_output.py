"""Best-effort writes: a full disk costs a run only a warning with path and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lrl.callbacks import Export
from lrl.errors import SHOWN_ALONE, ExportError
from lrl.system.output import best_effort, may_not_log
from tests.checkpoints.test_checkpoint_file import limit_files
from tests.run_without_generators import fit, trainer


class FullDisk(L.Callback):
    """Puts TensorBoard's file on a full disk from a step on."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            writer = trainer.logger.experiment._get_file_writer().event_writer  # type: ignore[union-attr]
            writer._general_file_writer.filename = "/dev/full"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_logger_on_a_full_disk_gives_one_warning_and_the_run_continues(
    policy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = TensorBoardLogger(str(tmp_path), name="run", version="0", flush_secs=1)
    running = trainer(tmp_path, FullDisk(), logger=logger)
    fit(policy, running)
    assert running.global_step == running.max_steps
    warnings = [
        record.getMessage() for record in caplog.records if record.name == "lrl.system.output"
    ]
    assert len(warnings) == 1
    assert "Errno 28" in warnings[0] and str(tmp_path / "run") in warnings[0]


def test_an_export_to_an_unwritable_folder_goes_to_the_temporary_folder(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "policy").touch()
    running = trainer(tmp_path, export := Export(str(tmp_path / "policy")), max_steps=1)
    fit(policy, running)
    assert list((tmp_path / "elsewhere").glob("lrl-policy-*/model.safetensors"))
    assert export.path(running).parent == tmp_path / "elsewhere"
    assert f"cannot be written to {tmp_path / 'policy'}" in caplog.text


def test_an_export_that_fits_nowhere_ends_in_one_error_with_the_remedy(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    running = trainer(tmp_path, Export(str(tmp_path / "policy")), max_steps=1)
    fit(policy, running)
    limit_files(100_000)
    try:
        with pytest.raises(ExportError, match="File too large") as ended:
            Export(str(tmp_path / "again")).on_train_end(running, running.lightning_module)
    finally:
        limit_files(None)
    assert isinstance(ended.value, SHOWN_ALONE)
    assert f"cannot be written to {tmp_path / 'again'}" in str(ended.value)
    assert "nor to the temporary folder" in str(ended.value)
    assert "lrl export CHECKPOINT FOLDER" in str(ended.value)


def test_a_best_effort_block_suppresses_os_errors_only(caplog: pytest.LogCaptureFixture) -> None:
    with (
        best_effort("The responses to gsm8k", Path("/dev/full")),
        Path("/dev/full").open("w") as file,
    ):
        file.write("answer")
    assert "The responses to gsm8k cannot be written to /dev/full: [Errno 28]" in caplog.text
    with pytest.raises(ValueError, match="a fault"), best_effort("The curve", Path("curve.png")):
        raise ValueError("a fault")
    with pytest.raises(ValueError, match="of a logger"), may_not_log(None):
        raise ValueError("a fault of a logger")
