"""A real run whose generator is started by a command."""

from __future__ import annotations

from pathlib import Path

import pytest

import lrl
from benchmarks.runs import quiet_trainer
from lrl.callbacks import Throughput, WeightSync
from lrl.members.launchers import Command
from tests.leftovers import MARK, others_living
from tests.runs.test_async_run import PROMPTS, Witness, check_trained_once, data_module

STEPS, GROUPS = 3, 4


def test_a_launched_generator_joins_serves_the_run_and_ends_with_it(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = lrl.ServerSettings(max_num_seqs=64, dtype="float32", kv_cache_gib=0.1)
    launcher = Command(1, "env --unset=LRL_TOKEN {join}")  # as ssh, which passes no variables
    strategy = lrl.AsyncSingleDevice(generator_devices=0, launcher=launcher, server=settings)
    witness = Witness()
    trainer = quiet_trainer(
        STEPS,
        tmp_path / "run",
        devices=1,
        strategy=strategy,
        callbacks=[WeightSync(), Throughput(), witness],
    )
    monkeypatch.setenv(MARK, strategy.run_id)
    data = data_module(groups_per_step=GROUPS, max_lag=1, prompts=PROMPTS[: STEPS * GROUPS])
    trainer.fit(lrl.PolicyModule(str(policy_folder), lr=5e-4), datamodule=data)
    assert not others_living(strategy.run_id)
    check_trained_once(witness, STEPS * GROUPS, max_lag=1)
    assert trainer.callback_metrics["fleet/joined"] == 1
    text = (tmp_path / "run" / "env-generator-0.log").read_text()
    assert "generator 0: serves since version 0" in text
    assert "the run has ended, and so does it" in text
    assert not (tmp_path / "run" / "fleet").exists()
