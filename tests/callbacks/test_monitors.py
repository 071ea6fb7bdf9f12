"""ModelCheckpoint and EarlyStopping on metrics of rollouts and evaluations, without a validation
loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from transformers import LlamaConfig

import lrl
from tests.policies import GROUPS, SIZES, FakeStep, Steps, pack, save_model, trainer

STEPS = 8
ACCURACY = {0: 0.1, 2: 0.5, 5: 0.4, STEPS: 0.3}
"""By the step at which an evaluation ends; no epoch ends within the run."""


class Figures(L.Callback):
    """Gives a run the metrics that `Evaluation` and `RolloutLog` would give it."""

    def __init__(self, rewards: list[float] | None = None) -> None:
        self.rewards = rewards or [float(step) for step in range(STEPS)]

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._evaluate(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        pl_module.log("reward/mean", self.rewards[trainer.global_step - 1], batch_size=1)
        if trainer.global_step < STEPS:
            self._evaluate(trainer)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._evaluate(trainer)

    def _evaluate(self, trainer: L.Trainer) -> None:
        if (accuracy := ACCURACY.get(trainer.global_step)) is not None:
            trainer.callback_metrics["eval/held/accuracy"] = torch.tensor(accuracy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES))


def fit(folder: str, *callbacks: L.Callback, rewards: list[float] | None = None) -> L.Trainer:
    running = trainer(
        max_steps=STEPS,
        max_epochs=-1,
        callbacks=[Figures(rewards), *callbacks],
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )
    running.fit(lrl.PolicyModule(folder), Steps([FakeStep(pack(GROUPS))] * 100))
    return running


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({"mode": "max"}, ["step=2"]),
        ({"mode": "min", "save_top_k": 1}, [f"step={STEPS}"]),
        ({"save_top_k": -1}, ["step=2", "step=5", "step=8"]),
    ],
    ids=["the best", "the last, if it is the best", "each once"],
)
def test_checkpoints_by_an_evaluation_are_kept(
    how: dict[str, Any], kept: list[str], folder: str, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, monitor="eval/held/accuracy", filename="{step}", **how)
    fit(folder, saving)
    assert sorted(path.stem for path in tmp_path.glob("*.ckpt")) == kept
    if how.get("mode") == "max":
        assert float(saving.best_model_score) == pytest.approx(0.5)


def test_a_run_stops_when_its_evaluations_get_no_better(folder: str) -> None:
    stopping = EarlyStopping("eval/held/accuracy", mode="max", patience=1)
    assert fit(folder, stopping).global_step == 5


def test_a_callback_that_asks_for_the_end_of_an_epoch_gets_it(folder: str) -> None:
    stopping = EarlyStopping("reward/mean", mode="max", patience=1, check_on_train_epoch_end=True)
    assert fit(folder, stopping, rewards=[9.0, *[0.0] * (STEPS - 1)]).global_step == STEPS


def test_a_figure_that_the_first_step_does_not_log_is_said_with_the_nearest(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    fit(folder, EarlyStopping("eval/hold/accuracy", patience=1, strict=False))
    (text,) = (one.getMessage() for one in caplog.records if one.name == "lrl.callbacks.monitors")
    assert text.startswith("EarlyStopping.monitor is 'eval/hold/accuracy'")
    assert text.endswith("Did you mean eval/held/accuracy?")
