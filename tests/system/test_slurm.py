"""A job that SLURM starts again continues its own run, and no other job continues it.

Covers lrl/system/signals.py.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lrl.checkpoints.newest_checkpoint import find_by_lrl
from tests.run_without_generators import fit, trainer

Start = Callable[..., list[int]]


class Steps(L.Callback):
    """The steps that a run trains; at step 2 comes what SLURM sends before the time is over."""

    def __init__(self, signum: int | None) -> None:
        self.signum = signum
        self.trained: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.trained.append(trainer.global_step)
        if trainer.global_step == 2 and self.signum is not None:
            signal.raise_signal(self.signum)


@pytest.fixture
def start(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs a trainer as a task of a SLURM job that can be asked for its requeue; returns its
    steps."""
    asked = tmp_path / "scontrol"
    asked.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked; ls -R {tmp_path}/runs >> {tmp_path}/asked\n'
    )
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def run(
        job: int,
        *callbacks: L.Callback,
        restarts: int = 0,
        signum: int | None = None,
        words: str = "fit",
        ckpt_path: str | None = None,
        **settings: Any,
    ) -> list[int]:
        monkeypatch.setenv("SLURM_JOB_ID", str(job))
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
        monkeypatch.setattr("sys.argv", ["lrl", words])
        steps = Steps(signum)
        logged = {"logger": CSVLogger(tmp_path / "runs", "mine")} | settings
        running = trainer(tmp_path, steps, *callbacks, **{"max_steps": 4} | logged)
        find_by_lrl(running, lambda _: None)
        try:
            fit(policy, running, ckpt_path)
        except SystemExit as end:
            assert signum is not None and end.code == 128 + signum
        return steps.trained

    return run


def test_a_requeue_is_asked_for_when_the_runs_own_folder_has_its_checkpoint(
    start: Start, tmp_path: Path
) -> None:
    assert start(77, signum=signal.SIGUSR1) == [0, 1, 2]
    assert not list(tmp_path.glob("hpc_ckpt*")), "Lightning's, for any run that starts here"
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("requeue 77\n") and "last-step=2.ckpt" in asked


def test_only_the_requeued_job_continues_and_from_its_newest_checkpoint(start: Start) -> None:
    start(77, ModelCheckpoint(every_n_train_steps=1), signum=signal.SIGTERM)
    start(78, signum=signal.SIGTERM)
    assert start(79) == [0, 1, 2, 3], "a new job"
    assert start(80, restarts=1) == [0, 1, 2, 3], "killed before its first checkpoint"
    assert start(77, restarts=1) == [2, 3]
    assert start(77, restarts=1, words="fit --model.lr 1") == [0, 1, 2, 3], "its second command"


def test_a_requeued_job_continues_itself_and_not_the_checkpoint_that_it_began_with(
    start: Start,
) -> None:
    start(77, signum=signal.SIGTERM)
    assert start(78, max_steps=6, ckpt_path="last") == [2, 3, 4, 5]
    assert start(78, restarts=1, max_steps=8, ckpt_path="last") == [6, 7]
    assert start(77, restarts=1) == [2, 3]


def test_the_config_wins_over_what_lightning_finds_where_the_run_starts(
    start: Start, tmp_path: Path
) -> None:
    start(77, signum=signal.SIGTERM)
    (saved,) = tmp_path.glob("runs/**/*.ckpt")
    saved.rename(tmp_path / "hpc_ckpt_1.ckpt")
    assert start(78) == [0, 1, 2, 3]
    assert start(79, restarts=1) == [0, 1, 2, 3]
    assert start(80, ckpt_path="hpc") == [2, 3], "it is named"


def test_a_run_asks_for_no_requeue_where_the_user_wants_none(start: Start, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert start(77, signum=signal.SIGUSR1) == [0, 1, 2, 3], "ignored before the run"
    signal.signal(signal.SIGUSR1, before)
    own = SLURMEnvironment(auto_requeue=False)
    assert start(77, signum=signal.SIGTERM, plugins=[own]) == [0, 1, 2]
    assert not (tmp_path / "asked").exists()


def test_a_task_of_an_array_is_requeued_alone(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    start(77, signum=signal.SIGUSR1)
    assert (tmp_path / "asked").read_text().startswith("requeue 70_7\n")


def test_a_requeue_that_slurm_refuses_is_an_error_in_the_log(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\necho 'Requested operation is disabled' >&2; exit 1\n"
    )
    start(77, signum=signal.SIGUSR1)
    assert "SLURM does not requeue job 77: Requested operation is disabled" in caplog.text
