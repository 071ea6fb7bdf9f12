"""Generators whose sampled tokens are of another distribution than the policy's, which no probe
sees.

Covers lrl/weights/sampled_proof.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lrl
from benchmarks.runs import quiet_trainer
from lrl.callbacks import WeightSync
from tests.lent_server import Borrowing, LentServer, start_server
from tests.logits_bias import FLAG

ROOT = Path(__file__).parents[2]
PROMPTS = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 14) for b in range(10, 14)
]


@pytest.fixture(scope="module")
def biased(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentServer]:
    """A real server with a processor of logits that lrl would refuse as a setting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"])))
        server = start_server(
            policy_folder, tmp_path_factory.mktemp("server"), extra_args=dict(FLAG)
        )
    try:
        yield LentServer(server)
    finally:
        server.stop()


class Optioned(L.Callback):
    """Puts the server's option into the settings; the checks before a run would refuse this one
    there."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.server_settings.extra_args = dict(FLAG)  # type: ignore[attr-defined]


def fit(
    server: LentServer, policy: Path, folder: Path, *callbacks: L.Callback, **settings: Any
) -> dict[str, Any]:
    """Trains a step; returns its metrics. Without a WeightSync the policy brings its usual one, as
    in a script."""
    strategy = Borrowing(server)
    trainer = quiet_trainer(1, folder, devices=2, strategy=strategy, callbacks=list(callbacks))
    data: dict[str, Any] = {"groups_per_step": 2, "rollouts_per_group": 4, "max_prompt_tokens": 64}
    data |= {
        "prompts": PROMPTS,
        "rewards": ["tests.odd_lengths:brevity"],
        "max_response_tokens": 60,
    }
    trainer.fit(lrl.PolicyModule(str(policy), lr=1e-4), lrl.RolloutDataModule(**data | settings))
    return trainer.callback_metrics


def test_tokens_of_another_distribution_end_a_run_before_its_first_update(
    biased: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    sync = WeightSync()
    with pytest.raises(
        RuntimeError, match=r"step 0: .*just sampled.*logits-processors: tests.logits_bias"
    ) as told:
        fit(biased, policy_folder, tmp_path, Optioned(), sync)
    assert "The weights were not touched" in str(told.value)
    assert sync.probes.difference < 1e-5, "the probe sees nothing of it"
    with pytest.raises(RuntimeError, match="look for plugins and VLLM_ variables"):
        fit(biased, policy_folder, tmp_path, stragglers="mask")  # with the sync of a script


def test_a_limit_that_is_set_holds_for_sampled_tokens_too(
    biased: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    found = fit(biased, policy_folder, tmp_path, WeightSync(probe_tolerance=2.0))
    assert 0.05 < found["policy/mismatch_mean"] < 2.0


def test_a_temperature_is_no_difference(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    found = fit(lent_server, policy_folder, tmp_path, temperature=2.0)
    assert found["policy/mismatch_mean"] < 1e-5
