"""The first SIGINT or SIGTERM ends a run between two optimizer steps, with its own exit status. A job
that SLURM starts again continues its own run, and no other job does.

The second signal is in `tests/strategies/test_shutdown.py`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lrl.checkpoints.resume import find_by_lrl
from lrl.cli.main import main
from tests.run_without_generators import fit, trainer

BOTH = [signal.SIGINT, signal.SIGTERM]
Start = Callable[..., list[int]]


@pytest.fixture(autouse=True)
def pythons_own_handlers() -> Iterator[None]:
    """Sets Python's own handlers: tests in the background of a shell inherit its ignored SIGINT."""
    before = {signum: signal.getsignal(signum) for signum in BOTH}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class Signal(L.Callback):
    """Sends a signal, if any, to this process in one hook, at step 2 (or before there are steps).
    Keeps the steps that begin, and counts the backward passes that follow."""

    def __init__(self, signum: int | None, hook: str = "on_before_backward") -> None:
        self.signum = signum
        self.begun: list[int] = []
        self.backwards_after = 0
        self.sent = False
        setattr(self, hook, self._send)

    def _send(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        before_steps = not trainer.training or trainer.fit_loop.batch_idx < 0
        if self.signum and not self.sent and (trainer.global_step == 2 or before_steps):
            self.sent = True
            signal.raise_signal(self.signum)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.begun.append(trainer.global_step)

    def on_after_backward(self, *args: Any) -> None:
        self.backwards_after += self.sent


@pytest.mark.parametrize(
    ("signum", "hook", "steps"),
    [
        (signal.SIGTERM, "setup", 0),
        (signal.SIGINT, "on_train_start", 0),
        (signal.SIGINT, "on_before_backward", 2),
        (signal.SIGTERM, "on_before_backward", 2),
        (signal.SIGTERM, "on_before_optimizer_step", 3),
    ],
)
def test_the_first_signal_ends_the_run_with_its_status_in_every_hook_and_handlers_are_restored(
    policy: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
    hook: str,
    steps: int,
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lrl.callbacks.last_checkpoint.rank_zero_info", told.append)
    before = [signal.getsignal(each) for each in BOTH]
    sender = Signal(signum, hook)
    running = trainer(tmp_path, sender)
    with pytest.raises(SystemExit) as end:
        fit(policy, running)
    assert end.value.code == 128 + signum
    assert [signal.getsignal(each) for each in BOTH] == before
    assert sender.backwards_after == (1 if hook == "on_before_backward" else 0)
    shown = capfd.readouterr().err
    assert f"{signum.name}: the run" in shown and "A second signal ends it at once." in shown
    assert running.global_step == steps, "it waits for the end of an update"
    if steps:
        assert f"--ckpt_path {next(tmp_path.glob('**/*.ckpt'))}" in told[-1]
    else:
        assert not list(tmp_path.glob("**/*.ckpt"))


def test_a_signal_that_was_ignored_before_the_run_stays_ignored(
    policy: str, tmp_path: Path
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running = trainer(tmp_path, Signal(signal.SIGINT))
    fit(policy, running)
    assert running.global_step == running.max_steps


def test_a_run_on_another_thread_leaves_the_handlers_alone(policy: str, tmp_path: Path) -> None:
    before = [signal.getsignal(each) for each in BOTH]
    seen: list[Any] = []
    look = LambdaCallback(
        on_train_batch_end=lambda *_: seen.append([signal.getsignal(each) for each in BOTH])
    )
    thread = threading.Thread(target=fit, args=(policy, trainer(tmp_path, look)))
    thread.start()
    thread.join()
    assert seen == [before] * 7


def stopped_while_loading() -> list[dict[str, str]]:
    """Is stopped while it loads a data set, in the preflight checks."""
    signal.raise_signal(signal.SIGTERM)
    raise AssertionError("the signal came too late")


def test_the_command_exits_with_the_status_of_the_signal(
    quickstart_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lrl"])
    # Without a handler, SIGTERM would end the tests themselves.
    signal.signal(signal.SIGTERM, lambda signum, frame: pytest.fail("no handler for SIGTERM"))
    source = "tests.system.test_signals:stopped_while_loading"
    words = ["--model.model", str(quickstart_policy), "--data.prompts.source", source]
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", "quickstart", *words])
    assert end.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("**/generator-*.log"))


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
        steps = Signal(signum)
        logged = {"logger": CSVLogger(tmp_path / "runs", "mine")} | settings
        running = trainer(tmp_path, steps, *callbacks, **{"max_steps": 4} | logged)
        find_by_lrl(running, lambda _: None)
        try:
            fit(policy, running, ckpt_path)
        except SystemExit as end:
            assert signum is not None and end.code == 128 + signum
        return steps.begun

    return run


@pytest.mark.parametrize(("array", "asks_for"), [({}, "77"), ({"JOB": "70", "TASK": "7"}, "70_7")])
def test_a_requeue_is_asked_for_when_the_runs_own_folder_has_its_checkpoint(
    array: dict[str, str],
    asks_for: str,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in array.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}_ID", value)
    assert start(77, signum=signal.SIGUSR1) == [0, 1, 2]
    assert not list(tmp_path.glob("hpc_ckpt*")), "Lightning's, for any run that starts here"
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith(f"requeue {asks_for}\n") and "last-step=2.ckpt" in asked


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
