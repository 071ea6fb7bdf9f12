"""A real run by pull on two real vLLM servers.

Covers lrl/vllm_plugin/fetched_files.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lightning as L
import pytest

import lrl
from lrl.callbacks import Throughput, WeightSync
from tests.lent_server import Borrowing, LentServer, start_server
from tests.runs.test_async_run import PROMPTS, Witness, data_module


@pytest.fixture(scope="module")
def second_server(
    policy_folder: Path, lent_server: LentServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LentServer]:
    """Another generator of the same run, in bfloat16."""
    folder = tmp_path_factory.mktemp("second")
    server = start_server(
        policy_folder, folder, number=1, dtype="bfloat16", token=lent_server.token
    )
    try:
        yield LentServer(server)
    finally:
        server.stop()


class Pulling(Borrowing):
    """Borrowing generators that all write rollouts and fetch their weights."""

    def __init__(self, *servers: LentServer) -> None:
        super().__init__(*servers, weight_transfer="pull")
        self.num_evaluation_generators = 0


def test_a_run_by_pull_proves_every_version_trains_every_prompt_once_and_logs_the_bytes(
    policy_folder: Path,
    lent_server: LentServer,
    second_server: LentServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    witness, steps, groups = Witness(), 4, 4
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=Pulling(lent_server, second_server),
        callbacks=[WeightSync(prove_every_n_syncs=1), Throughput(), witness],
        max_steps=steps,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    policy = lrl.PolicyModule(str(policy_folder), lr=5e-4)
    trainer.fit(
        policy,
        datamodule=data_module(
            groups_per_step=groups, max_lag=1, prompts=PROMPTS[: steps * groups]
        ),
    )
    assert sorted(group.prompt.id for _, group in witness.groups) == list(range(steps * groups))
    lags = [step - version for step, rollout in witness.rollouts for version in rollout.versions]
    assert min(lags) >= 0 and max(lags) <= 1
    assert "is evicted" not in caplog.text
    assert (
        0
        < trainer.callback_metrics["weights/sent_bytes"]
        <= trainer.callback_metrics["weights/fetched_bytes"]
    )
