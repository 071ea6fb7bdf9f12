"""A run's folder is its own, and locked while the run lives."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lrl.callbacks import Export
from lrl.checkpoints.run_folder import RunFolderLock, run_folder
from tests.run_without_generators import fit, trainer
from tests.tiny_policies import tiny_llama


def test_a_live_runs_folder_is_an_error_that_names_its_process(tmp_path: Path) -> None:
    first, second = RunFolderLock(), RunFolderLock()
    first.acquire(tmp_path / "run")
    with pytest.raises(
        ValueError, match=rf"live run \(process {os.getpid()} on {socket.gethostname()}\)"
    ):
        second.acquire(tmp_path / "run")
    second.acquire(tmp_path / "another")
    first.release()
    second.acquire(tmp_path / "run")
    first.acquire(tmp_path / "another")


def test_a_killed_run_releases_its_folder(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    holder = os.fork()
    if not holder:
        claim = RunFolderLock()
        claim.acquire(tmp_path)
        os.write(writing, b"taken")
        signal.pause()
    assert os.read(reading, 5) == b"taken"
    with pytest.raises(ValueError, match=f"process {holder} on"):
        RunFolderLock().acquire(tmp_path)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    RunFolderLock().acquire(tmp_path)


def test_of_runs_that_begin_at_once_each_has_a_folder_of_its_own(tmp_path: Path) -> None:
    first, second = RunFolderLock(), RunFolderLock()
    begun: list[Path] = []

    class Overtaken(TensorBoardLogger):
        """Between its number and its folder another run takes both."""

        def _get_next_version(self) -> int:
            number = super()._get_next_version()
            if not begun:
                other = trainer(tmp_path, logger=TensorBoardLogger(tmp_path))
                first.acquire_for(other)
                begun.append(run_folder(other))
            return number

    running = trainer(tmp_path, logger=[Overtaken(tmp_path), CSVLogger(tmp_path)])
    second.acquire_for(running)
    runs = tmp_path / "lightning_logs"
    assert begun == [runs / "version_0"] and run_folder(running) == runs / "version_1"
    assert running.loggers[1].log_dir == str(runs / "version_1"), "one number for both loggers"
    for folder in runs.iterdir():
        with pytest.raises(ValueError, match="live run"):
            RunFolderLock().acquire(folder)


def test_a_logger_that_numbers_no_folder_gives_each_run_the_same(tmp_path: Path) -> None:
    """lrl asked it for the next number for ever, once there was the folder."""
    asked: list[int] = []

    class Plain(CSVLogger):
        """As Lightning's LitLogger."""

        @property
        def log_dir(self) -> str:
            return str(tmp_path / "plain")

        def _get_next_version(self) -> int:
            asked.append(super()._get_next_version())
            assert len(asked) < 20
            return asked[-1]

    for _ in range(2):
        claim = RunFolderLock()
        claim.acquire_for(trainer(tmp_path, logger=Plain(tmp_path)))
        with pytest.raises(ValueError, match="live run"):
            RunFolderLock().acquire_for(trainer(tmp_path, logger=Plain(tmp_path)))
        claim.release()
    assert (tmp_path / "plain").is_dir()


def test_only_a_folder_that_this_run_has_made_and_filled_with_nothing_is_discarded(
    tmp_path: Path,
) -> None:
    claim, new, earlier = RunFolderLock(), tmp_path / "new", tmp_path / "earlier"
    earlier.mkdir()
    claim.acquire(earlier)
    claim.discard()
    assert earlier.exists(), "another run has made it"
    claim.acquire(new)
    (new / "config.yaml").touch()
    log = new / "generator-0.log"
    log.touch()
    claim.discard()
    assert log.exists() and (new / "config.yaml").exists(), "it has a log"
    log.unlink()
    claim.discard()
    assert not new.exists()
    claim.acquire(new)
    claim.keep()
    claim.discard()
    assert new.exists(), "the run has begun"


def test_a_discarded_folder_leaves_no_empty_parent_and_those_of_others_stay(
    tmp_path: Path,
) -> None:
    claim, other = RunFolderLock(), RunFolderLock()
    claim.acquire(tmp_path / "runs" / "own" / "version_0")
    other.acquire(tmp_path / "runs" / "own" / "version_1")
    claim.discard()
    assert [path.name for path in (tmp_path / "runs" / "own").iterdir()] == ["version_1"]
    other.discard()
    claim.acquire(tmp_path / "mine" / "own" / "version_0")
    claim.discard()
    assert not (tmp_path / "mine").exists()


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


def test_each_run_of_a_logger_with_one_folder_for_all_has_its_own_files(tmp_path: Path) -> None:
    policy = str(tiny_llama(tmp_path / "tiny"))
    folders = []
    for _ in range(2):
        running = trainer(tmp_path, Export(), logger=Tracker(tmp_path / "runs"), max_steps=1)
        fit(policy, running)
        folder = run_folder(running)
        assert (folder / "policy" / "model.safetensors").exists()
        (checkpoints,) = running.checkpoint_callbacks
        assert Path(checkpoints.dirpath) == folder / "checkpoints"
        folders.append(folder)
    assert folders[0] != folders[1] and {one.parent for one in folders} == {tmp_path / "runs/sums"}
