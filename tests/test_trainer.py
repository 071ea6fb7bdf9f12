"""The trainer with the defaults of a run, and what it refuses. Covers `lrl/trainer.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

import lrl
from lrl.callbacks import Health
from lrl.errors import ConfigError
from lrl.run import Run
from lrl.trainer import USUAL_CALLBACKS
from lrl.types import MicroBatch, Step


class ServersReached(Exception):
    """In the place of the start of the servers."""


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, Any]:
    return {"logger": False, "default_root_dir": tmp_path, "accelerator": "cpu", "max_steps": 1}


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> lrl.RolloutDataModule:
    def reached(self: Run) -> None:
        raise ServersReached

    monkeypatch.setattr(Run, "start", reached)
    sizes = {"groups_per_step": 1, "max_prompt_tokens": 64, "max_response_tokens": 32}
    rows = [{"prompt": "1+1=", "answer": "2"}]
    return lrl.RolloutDataModule(rows, "tests.odd_lengths:brevity", **sizes)


def usual(trainer: L.Trainer) -> list[str]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    names = [type(one).__name__ for one in callbacks if "lrl" in type(one).__module__]
    return [name for name in names if name in USUAL_CALLBACKS]


def test_a_trainer_has_the_usual_callbacks_and_those_given_take_their_place(
    quiet: dict[str, Any],
) -> None:
    own = Health(ranges={"policy/ess": None})
    trainer = lrl.Trainer(callbacks=own, **quiet)
    assert sorted(usual(trainer)) == sorted(USUAL_CALLBACKS)
    assert own in trainer.callbacks and trainer.log_every_n_steps == 1  # type: ignore[attr-defined]
    assert isinstance(trainer.strategy, lrl.AsyncSingleDevice)
    assert usual(lrl.Trainer(usual_callbacks=False, **quiet)) == []
    assert "Progress" not in usual(lrl.Trainer(enable_progress_bar=False, **quiet))
    bar = L.pytorch.callbacks.TQDMProgressBar()
    assert "Progress" not in usual(lrl.Trainer(callbacks=[bar], **quiet))


@pytest.mark.parametrize(("devices", "generate"), [("auto", 0), (1, 0), (2, 1), (4, 3)])
def test_all_devices_but_the_trainers_generate(
    devices: int | str, generate: int, quiet: dict[str, Any]
) -> None:
    strategy: Any = lrl.Trainer(devices=devices, **quiet).strategy
    assert (len(strategy.parallel_devices), len(strategy.generator_devices)) == (1, generate)


def test_an_own_loss_is_tried_before_a_server_starts(
    policy_folder: Path, data: lrl.RolloutDataModule, quiet: dict[str, Any]
) -> None:
    class Own(lrl.PolicyModule):
        tried = 0

        def compute_loss(self, micro: MicroBatch) -> Tensor:
            self.log("own/tokens", float(micro.num_tokens))
            self.tried += 1
            return -(micro.advantages * self(micro)).sum()

    class Measured(Own):
        def training_step(self, step: Step, batch_idx: int) -> None:
            self.tried = 0
            super().training_step(step, batch_idx)
            pytest.fail("an optimizer step was done")

    class Wrong(lrl.PolicyModule):
        def compute_loss(self, micro: MicroBatch) -> Tensor:
            return -(micro.advantage * self(micro)).sum()  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="advantage"):
        lrl.Trainer(**quiet).fit(Wrong(str(policy_folder)), data)
    for policy in (Own(str(policy_folder)), Measured(str(policy_folder))):
        with pytest.raises(ServersReached):
            lrl.Trainer(**quiet).fit(policy, data)
        assert policy.tried == 1
    assert all(weight.grad is None or not weight.grad.any() for weight in policy.parameters())
    assert policy.log.__func__ is lrl.PolicyModule.log, "its own again"  # type: ignore[attr-defined]


def test_another_strategy_other_data_an_empty_validation_and_other_verbs_are_refused(
    policy_folder: Path, data: lrl.RolloutDataModule, quiet: dict[str, Any]
) -> None:
    policy = lrl.PolicyModule(str(policy_folder))
    with pytest.raises(ConfigError, match="SingleDeviceStrategy.*lrl.AsyncDDP"):
        L.Trainer(**quiet).fit(policy, data)
    with pytest.raises(ConfigError, match="no lrl.RolloutDataModule"):
        lrl.Trainer(**quiet).fit(policy, torch.utils.data.DataLoader([1]))
    for verb, remedy in (
        ("validate", "lrl.callbacks.Evaluation, and there is none"),
        ("test", "trainer.validate"),
        ("predict", "lrl chat"),
    ):
        with pytest.raises(ConfigError, match=remedy):
            getattr(lrl.Trainer(**quiet), verb)(policy, data)
