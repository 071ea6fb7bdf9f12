"""No process outlives its run, and nothing of it stays in /dev/shm, whichever way it ends. Each end
is a whole run.

The good end is a script of the README (`tests/runs/test_readme.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.leftovers import MARK, living, wait_for
from tests.lent_server import LentServer
from tests.runs.test_async_run import Witness, fit
from tests.strategies import run_of_ranks
from tests.strategies.forked_ranks import Fork, start_fork
from tests.strategies.run_of_ranks import EndsAt

FAILS_AT = 3


@pytest.fixture
def run(policy_folder: Path, tmp_path: Path, mark: str) -> Iterator[Callable[..., Fork]]:
    started = []

    def run(*callbacks: L.Callback) -> Fork:
        variables = {name: os.environ[name] for name in (MARK, "TMPDIR")}
        words = (str(policy_folder), str(tmp_path), *callbacks)
        started.append(start_fork(run_of_ranks.train, tmp_path / "output", variables, *words))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()


def wait_for_step(
    process: Fork | subprocess.Popen[str], step: int, output: Path, ranks: int = 1
) -> None:
    """Waits until every rank has written its line of a step."""
    text = f"step {step}: "

    def told() -> bool:
        return output.read_text().count(text) == ranks

    wait_for(lambda: told() or process.poll() is not None, 300.0, text)
    if not told():
        pytest.fail(f"the run ended before step {step}:\n{output.read_text()[-4000:]}")


def test_a_run_whose_module_fails_leaves_nothing_and_says_why(run: Callable[..., Fork]) -> None:
    process = run(EndsAt(2, error="the module fails"))
    assert process.wait(400) == 1
    assert "RuntimeError: the module fails" in process.printed()


# SIGTERM goes the way of SIGINT; runs with several ranks get it (`test_ranks_run.py`).
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_ended_by_a_signal_leaves_nothing(
    run: Callable[..., Fork], tmp_path: Path, mark: str, signum: signal.Signals
) -> None:
    process = run()
    wait_for_step(process, 2, process.output)
    assert len(living(mark)) >= 4, "reward worker, supervisor, API server, engine"
    process.send_signal(signum)
    status = process.wait(400)
    if signum == signal.SIGKILL:
        return
    assert status == 128 + signum
    path = next((tmp_path / "checkpoints").glob("*"))
    assert process.printed().splitlines()[-1].endswith(f"Resume with --ckpt_path {path}")
    assert torch.load(path, weights_only=True)["global_step"] >= 2


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]])
def test_a_run_ended_by_a_signal_while_its_server_starts_leaves_nothing(
    run: Callable[..., Fork], tmp_path: Path, mark: str, signals: list[signal.Signals]
) -> None:
    process = run()
    wait_for(lambda: list(tmp_path.glob("generator-0.log")), 300.0, "the server's log")
    wait_for(lambda: len(living(mark)) >= 2, 300.0, "supervisor and API server")
    process.send_signal(signals[0])
    if len(signals) > 1:
        wait_for(
            lambda: "A second signal" in process.printed(), 300.0, "the word on the first signal"
        )
        process.send_signal(signals[1])
    assert process.wait(400) == (-signal.SIGINT if len(signals) > 1 else 128 + signal.SIGTERM)
    assert not list(tmp_path.glob("**/*.ckpt"))


class FailsAndIsStopped(L.Callback):
    """An error ends the run after step `FAILS_AT`; SIGTERM comes while its last checkpoint waits for
    the generators."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == FAILS_AT:
            raise RuntimeError("of this test")

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        # Longer than a wait without a look at signals.
        strategy.run.loop.loop.call_soon_threadsafe(time.sleep, 1.0)
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_does_not_break_off_the_checkpoint_of_a_run_that_fails(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    """As when a rank is lost and whoever placed it asks the others to end."""
    callbacks = [ModelCheckpoint(every_n_train_steps=1000), FailsAndIsStopped()]
    with pytest.raises(RuntimeError, match="of this test"):
        fit(lent_server, policy_folder, tmp_path, callbacks=callbacks)
    assert (tmp_path / "checkpoints" / f"last-step={FAILS_AT}.ckpt").exists()


class StoppedBeforeAGradient(L.Callback):
    """SIGTERM comes in the middle of step `FAILS_AT`."""

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == FAILS_AT:
            signal.raise_signal(signal.SIGTERM)


def test_a_run_stopped_within_a_step_resumes_with_that_steps_prompts(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    small: dict[str, Any] = {"micro_batch_tokens": 256}  # several backward passes a step
    whole = fit(lent_server, policy_folder, tmp_path / "whole", **small)
    first = Witness()
    callbacks = [ModelCheckpoint(every_n_train_steps=1000), StoppedBeforeAGradient(), first]
    with pytest.raises(SystemExit):
        fit(lent_server, policy_folder, tmp_path, callbacks=callbacks, **small)
    path = tmp_path / "checkpoints" / f"last-step={FAILS_AT}.ckpt"
    rest = fit(lent_server, policy_folder, tmp_path / "rest", ckpt_path=str(path), **small)
    trained = [group.prompt.id for _, group in [*first.groups, *rest.groups]]
    assert sorted(trained) == sorted(group.prompt.id for _, group in whole.groups)
    assert [*first.lrs, *rest.lrs] == pytest.approx(whole.lrs)
    for name, weights in first.weights[FAILS_AT].items():
        assert weights.equal(rest.weights[FAILS_AT][name])
