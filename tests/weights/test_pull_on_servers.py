"""Pull between a trainer and two real vLLM servers, and in a real run.

Covers lrl/vllm_plugin/fetched_files.py.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lrl
from lrl.callbacks import Throughput, WeightSync
from lrl.generators.generator import Generator
from lrl.generators.supervisor import SHM
from lrl.weights import pull
from lrl.weights.pull import Pull
from tests.lent_server import Borrowing, LentServer, start_server
from tests.runs.test_async_run import PROMPTS, Witness, data_module
from tests.weights.scene import PolicyInMemory, ProvedScene
from tests.weights.whole_weights import WholeWeights


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


class TwoServers(ProvedScene):
    """Two generators, their syncs and the proof of each."""

    def __init__(self, folder: Path, *servers: LentServer) -> None:
        policy = PolicyInMemory(folder)
        self.network = policy.network
        super().__init__(
            policy,
            [Generator(server, 8) for server in servers],
            WholeWeights(self.network.named_parameters),
            Pull,
            name=f"{servers[0].run_id}-pull",
            prove_every_n_syncs=1,
        )

    @torch.no_grad()
    def step(self) -> None:
        """Changes one weight in a hundred, far more than rounding does."""
        for weight in self.network.parameters():
            weight += 0.05 * torch.randn_like(weight) * (torch.rand_like(weight) < 0.01)

    def sync(self, *generators: Generator) -> dict[Generator, str]:
        """Makes a step, gives it to the generators and proves it; returns those that failed."""
        self.step()
        self.pool.generators = list(generators)
        failed = self.syncs.sync_now(self.version)
        self.version += 1
        unproved = self.syncs.wait()
        assert unproved == {}, unproved
        return failed


@pytest.fixture
def scene(
    policy_folder: Path,
    lent_server: LentServer,
    second_server: LentServer,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TwoServers]:
    """Each generator fetches for itself, as those of several machines do."""
    monkeypatch.setattr(pull, "machine_of", lambda generator: generator.name)
    made = TwoServers(policy_folder, lent_server, second_server)
    yield made
    made.close()


def files_of(server: Any) -> list[str]:
    (folder,) = SHM.glob(f"{server.own_files}*")
    return os.listdir(folder)


def test_every_version_arrives_by_whole_and_by_delta_and_is_proved(
    scene: TwoServers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lrl.weights.pull")
    first, second = scene.generators
    assert scene.sync(first, second) == {}
    assert scene.sync(first) == {}
    caplog.clear()
    assert scene.sync(first, second) == {}
    ways = {
        str(record.args[0]): record.args[1]
        for record in caplog.records
        if "has the weights" in record.msg
    }
    assert ways == {"generator 0": "delta", "generator 1": "whole"}
    for generator in scene.generators:
        assert len([name for name in files_of(generator.server) if "." not in name]) == 1


class Pulling(Borrowing):
    """Borrowing generators that all write rollouts and fetch their weights."""

    def __init__(self, *servers: LentServer) -> None:
        super().__init__(*servers, weight_transfer="pull")
        self.num_evaluation_generators = 0


def test_a_run_by_pull_trains_every_prompt_once_and_logs_the_bytes(
    policy_folder: Path, lent_server: LentServer, second_server: LentServer, tmp_path: Path
) -> None:
    witness, steps, groups = Witness(), 4, 4
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=Pulling(lent_server, second_server),
        callbacks=[WeightSync(), Throughput(), witness],
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
    assert (
        0
        < trainer.callback_metrics["weights/sent_bytes"]
        <= trainer.callback_metrics["weights/fetched_bytes"]
    )
