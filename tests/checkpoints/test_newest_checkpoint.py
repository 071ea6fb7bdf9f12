"""`ckpt_path="last"` is the newest checkpoint of the run that is named, or an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lrl.checkpoints.newest_checkpoint import newest_checkpoint


def save(path: Path, written_at: int, steps: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": steps}, path)
    os.utime(path, (written_at, written_at))
    return str(path)


def trainer(folder: Path, **settings: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return L.Trainer(default_root_dir=folder, **quiet | settings)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_without_a_version_it_is_of_the_run_of_that_name_that_has_written_last(
    tmp_path: Path, kind: Any
) -> None:
    save(tmp_path / "mine/version_2/checkpoints/epoch=0-step=300.ckpt", written_at=100)
    save(tmp_path / "mine/version_0/checkpoints/epoch=0-step=50.ckpt", written_at=300)
    newest = save(tmp_path / "mine/version_0/checkpoints/last-step=96.ckpt", written_at=200)
    save(tmp_path / "other/version_0/checkpoints/last-step=999.ckpt", written_at=400)
    (tmp_path / "mine/version_3").mkdir()
    assert newest_checkpoint(trainer(tmp_path, logger=kind(tmp_path, name="mine"))) == newest


@pytest.mark.parametrize("version", [1, "version_1"])
def test_the_version_names_the_run(tmp_path: Path, version: int | str) -> None:
    named = save(tmp_path / "mine/version_1/checkpoints/last-step=8.ckpt", written_at=100)
    save(tmp_path / "mine/version_0/checkpoints/last-step=96.ckpt", written_at=200)
    assert (
        newest_checkpoint(trainer(tmp_path, logger=CSVLogger(tmp_path, "mine", version))) == named
    )


def test_of_checkpoints_of_equal_steps_the_newest_file_is_taken_whatever_its_name(
    tmp_path: Path,
) -> None:
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints / "epoch=0-step=9.ckpt", written_at=300)
    save(checkpoints / "epoch=0-step=10.ckpt", written_at=100)
    newest = save(checkpoints / "last.ckpt", written_at=200, steps=10)
    (checkpoints / "torn.ckpt").write_text("half a checkpoint")
    (checkpoints / "epoch=0-step=11.ckpt.unfinished").touch()
    assert newest_checkpoint(trainer(tmp_path, logger=False)) == newest
    assert (
        newest_checkpoint(trainer(tmp_path / "else", callbacks=[ModelCheckpoint(checkpoints)]))
        == newest
    )


def test_a_run_without_a_checkpoint_is_an_error_that_names_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'last', and there is no checkpoint in .*version_7"):
        newest_checkpoint(trainer(tmp_path, logger=CSVLogger(tmp_path, "mine", "version_7")))
