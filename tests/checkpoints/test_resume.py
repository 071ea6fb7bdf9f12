"""`ckpt_path="last"` is the newest checkpoint of the run that is named, or an error. Fingerprints of
settings are the same in every process, and others as soon as a setting differs.

Covers lrl/checkpoints/made_with.py.
"""

from __future__ import annotations

import datetime
import importlib
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lrl.checkpoints.made_with import changes, fingerprint
from lrl.checkpoints.resume import newest_checkpoint
from lrl.rewards import Format, Function
from lrl.rollouts.learners import settings_of
from tests.run_without_generators import trainer


def save(path: Path, written_at: int, steps: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": steps}, path)
    os.utime(path, (written_at, written_at))
    return str(path)


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
    assert newest_checkpoint(trainer(tmp_path / "else", ModelCheckpoint(checkpoints))) == newest


VALUES = [
    *(None, 1, 1.0, "1", b"1", True, [1, 2], (1, 2), [2, 1], {"a": 1}, {"a": 2}, {1, 2}),
    *(Decimal("1.5"), datetime.date(2026, 1, 2), Path("a"), fingerprint, changes),
    *(np.float64(1.5), np.arange(3), np.arange(2000), np.arange(1, 2001)),
]


def test_values_that_differ_have_different_fingerprints_and_equal_ones_the_same() -> None:
    assert len({fingerprint(value) for value in VALUES}) == len(VALUES)
    assert fingerprint({"a": 1, "b": [{2, 1}]}) == fingerprint({"b": [{1, 2}], "a": 1})
    assert fingerprint("\ud800") != fingerprint("")


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    program = (
        "from lrl.checkpoints.made_with import fingerprint; import lrl; class_, set_, object_ = "
        "lrl.rewards.GSM8K, {'a', 'b', 'c', 'd'}, type('Own', (), {})(); object_.it = object_; "
        "print(fingerprint([class_, set_, object_, object()]))"
    )
    environment = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in (1, 2)]
    command = [sys.executable, "-c", program]
    message = [
        subprocess.run(command, env=each, capture_output=True, text=True, check=True).stdout
        for each in environment
    ]
    assert message[0] == message[1] != ""


def test_a_reward_whose_code_was_corrected_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "judging.py"
    found = []
    for sign in ("", "-"):
        file.write_text(f"def right(prompt, response, **columns):\n    return {sign}1.0\n")
        importlib.invalidate_caches()
        sys.modules.pop("judging", None)
        found.append(settings_of([Function(f"{file}:right")]))
    assert changes(*found) == "data.rewards right has changed"
    others = settings_of([Function(f"{file}:right", weight=2.0), Format("b")])
    assert "right has changed" in changes(found[1], others) and not changes(others, others)


def test_the_log_has_numbers_before_and_after() -> None:
    assert changes({"data.temperature": 1.0, "b": "x"}, {"data.temperature": 0.5, "b": "x"}) == (
        "data.temperature was 1 and is 0.5"
    )
    assert changes({"a": "x"}, {"a": "y", "c": 3}) == "a has changed, c has changed"
    assert changes(None, {}) == "the checkpoint does not say what they were made with"
