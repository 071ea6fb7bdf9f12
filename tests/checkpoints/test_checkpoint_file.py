"""Atomic checkpoint files: a full disk costs neither the run nor its last checkpoint."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lrl.checkpoints.checkpoint_file import UNFINISHED, CheckpointFile
from tests.leftovers import wait_for
from tests.run_without_generators import fit, trainer
from tests.tiny_policies import tiny_llama

KILLS = 8


def save_for_ever(path: Path) -> None:
    checkpoint: dict[str, Any] = {"global_step": 0, "weights": torch.zeros(4_000_000)}
    while True:
        CheckpointFile().save_checkpoint(checkpoint, path)
        checkpoint["global_step"] += 1
        checkpoint["weights"] += 1


def limit_files(free: int | None) -> None:
    """Limits the files of this process to so many bytes: an OSError, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if free is None else free, hard))


class FullDisk(L.Callback):
    """Makes the disk full during some steps."""

    def __init__(self, steps: range) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        limit_files(100_000 if trainer.global_step in self.steps else None)


@pytest.fixture
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("tiny")))


def test_a_run_killed_while_it_writes_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    unfinished, torn = path.with_name(path.name + UNFINISHED), 0
    for _ in range(KILLS):
        process = multiprocessing.get_context("fork").Process(target=save_for_ever, args=(path,))
        process.start()
        wait_for(path.exists, 30.0, "a first checkpoint")
        deadline = time.monotonic() + 30.0
        while not unfinished.exists() and time.monotonic() < deadline:
            time.sleep(0.0005)
        process.kill()
        process.join()
        torn += unfinished.exists()
        found = torch.load(path, weights_only=True)
        assert torch.equal(found["weights"], torch.full((4_000_000,), float(found["global_step"])))
    assert torn, "no kill met a file that was being written"


def test_a_full_disk_is_a_warning_with_path_and_reason_and_leaves_no_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io, path = CheckpointFile(), tmp_path / "last.ckpt"
    io.save_checkpoint({"global_step": 1, "weights": torch.zeros(100_000)}, path)
    limit_files(100_000)
    io.save_checkpoint({"global_step": 2, "weights": torch.ones(100_000)}, path)
    limit_files(None)
    assert io.refused is not None and io.newest_step == 1
    assert str(path) in caplog.text and "Errno 27" in caplog.text
    assert torch.load(path, weights_only=True)["global_step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_that_is_not_of_the_disk_is_not_reported_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*words: Any) -> None:
        raise AttributeError("a fault of torch")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(AttributeError, match="a fault of torch"):
        CheckpointFile().save_checkpoint({"global_step": 1}, tmp_path / "last.ckpt")


def test_a_run_on_a_full_disk_keeps_its_last_good_checkpoint_until_there_is_a_newer_one(
    policy: str, tmp_path: Path
) -> None:
    found: list[list[str]] = []

    class Look(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            found.append(sorted(path.name for path in (tmp_path / "checkpoints").glob("*")))

    newest_only = ModelCheckpoint(
        dirpath=tmp_path / "checkpoints", filename="{step}", every_n_train_steps=1
    )
    fit(policy, trainer(tmp_path, FullDisk(range(2, 4)), Look(), newest_only, max_steps=6))
    kept = [["step=2.ckpt"]] * 3
    assert found == [[], ["step=1.ckpt"], *kept, ["step=5.ckpt"]]


def test_a_plugin_of_the_users_own_is_left_in_its_place(policy: str, tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    own = AsyncCheckpointIO()
    settings = {"logger": False, "default_root_dir": tmp_path}
    strategy = trainer(tmp_path).strategy
    running = L.Trainer(strategy=strategy, plugins=[own], max_steps=2, **settings)
    assert isinstance(running.strategy, SingleDeviceStrategy)
    fit(policy, running)
    assert running.strategy.checkpoint_io is own
    assert list(tmp_path.glob("**/*.ckpt"))


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library cannot be told"
)
def test_a_checkpoint_returns_freed_memory_between_blocks_in_use_to_the_system(
    tmp_path: Path,
) -> None:
    blocks = [torch.ones(16_000) for _ in range(3_000)]  # 62 KiB each: from the heap, not mapped
    in_use = blocks[::2]
    del blocks
    before = psutil.Process().memory_info().rss
    CheckpointFile().save_checkpoint({"global_step": 1}, tmp_path / "some.ckpt")
    assert psutil.Process().memory_info().rss < before - 50 * 2**20
    assert all(block.sum() == 16_000 for block in in_use)
