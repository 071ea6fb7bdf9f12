"""A run on a real vLLM server that a signal ends in the middle of a step, and its resume.

Covers lrl/strategies/graceful_shutdown.py.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.lent_server import LentServer
from tests.runs.test_async_run import STEPS, Witness, fit

STOPPED = 3
SMALL: dict[str, Any] = {"micro_batch_tokens": 256}


class SignalWithin(L.Callback):
    """Sends SIGTERM at one moment of step `STOPPED`."""

    def __init__(self, moment: str) -> None:
        setattr(self, moment, self._send)

    def _send(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == STOPPED:
            signal.raise_signal(signal.SIGTERM)


class FailsAndIsStopped(L.Callback):
    """An error ends the run after step `STOPPED`; SIGTERM comes while its last checkpoint waits for
    the generators."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == STOPPED:
            raise RuntimeError("of this test")

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        # Longer than a wait without a look at signals.
        strategy.run.fleet.loop.loop.call_soon_threadsafe(time.sleep, 1.0)
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def whole(
    lent_server: LentServer, policy_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Witness:
    """The run that nothing stops."""
    return fit(lent_server, policy_folder, tmp_path_factory.mktemp("whole"), **SMALL)


@pytest.mark.parametrize("moment", ["on_before_backward", "on_train_batch_end"])
def test_a_run_stopped_within_a_step_resumes_with_that_steps_prompts(
    lent_server: LentServer, policy_folder: Path, whole: Witness, tmp_path: Path, moment: str
) -> None:
    none_due, first = ModelCheckpoint(every_n_train_steps=1000), Witness()
    with pytest.raises(SystemExit) as end:
        fit(
            lent_server,
            policy_folder,
            tmp_path,
            callbacks=[none_due, SignalWithin(moment), first],
            **SMALL,
        )
    assert end.value.code == 143
    path = tmp_path / "checkpoints" / f"last-step={STOPPED}.ckpt"
    rest = fit(lent_server, policy_folder, tmp_path / "rest", ckpt_path=str(path), **SMALL)
    trained = [group.prompt.id for _, group in [*first.groups, *rest.groups]]
    assert sorted(trained) == sorted(group.prompt.id for _, group in whole.groups)
    assert [step for step, _ in rest.groups] == sorted(2 * [*range(STOPPED, STEPS)])
    assert [*first.lrs, *rest.lrs] == pytest.approx(whole.lrs)
    for name, weights in first.weights[STOPPED].items():
        assert weights.equal(rest.weights[STOPPED][name])


def test_a_signal_does_not_break_off_the_checkpoint_of_a_run_that_fails(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    """As when a rank is lost and whoever placed it asks the others to end."""
    callbacks = [ModelCheckpoint(every_n_train_steps=1000), FailsAndIsStopped()]
    with pytest.raises(RuntimeError, match="of this test"):
        fit(lent_server, policy_folder, tmp_path, callbacks=callbacks, **SMALL)
    assert (tmp_path / "checkpoints" / f"last-step={STOPPED}.ckpt").exists()
