"""A real run whose generator and worker are steps of a real SLURM cluster, on a node in another
namespace.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lrl
from lrl.callbacks import Throughput, WeightSync
from lrl.members.launchers import Slurm
from tests.leftovers import MARK, living, words
from tests.network_namespace import HERE
from tests.runs.test_async_run import PROMPTS, Witness, data_module
from tests.slurm_cluster import slurm_cluster

STEPS, GROUPS, CANCELLED_AT = 5, 4, 2
ROOT = Path(__file__).parents[2]


class Cancels(L.Callback):
    """Has SLURM end the jobs of the generator and of the worker in mid-run."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == CANCELLED_AT:
            jobs = subprocess.check_output(
                ["squeue", "--noheader", "--format=%k"], text=True, timeout=60
            )
            assert "mine" in jobs.split(), "the generator's option"
            for name in ("lrl-worker-0", "lrl-generator-0"):
                subprocess.run(["scancel", f"--name={name}"], check=True, timeout=60)


def test_a_run_whose_jobs_slurm_has_cancelled_goes_on_with_other_jobs_and_leaves_nothing(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = lrl.ServerSettings(
        max_num_seqs=64, dtype="float32", kv_cache_gib=0.1, host=HERE, insecure=True
    )
    strategy = lrl.AsyncSingleDevice(
        generator_devices=0,
        launcher=Slurm(1, options=["--comment=mine"]),
        server=settings,
        heartbeat_s=5.0,
    )
    witness = Witness()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[WeightSync(), Throughput(), witness, Cancels()],
        max_steps=STEPS,
        logger=False,
        default_root_dir=tmp_path / "run",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with slurm_cluster(monkeypatch):
        monkeypatch.setenv(MARK, strategy.run_id)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the node imports the reward
        rows = PROMPTS[: STEPS * GROUPS]
        data = data_module(
            groups_per_step=GROUPS, max_lag=1, prompts=rows, worker_launcher=Slurm(1)
        )
        trainer.fit(lrl.PolicyModule(str(policy_folder), lr=5e-4), datamodule=data)
        left = [message for process in living(strategy.run_id) if (message := words(process))]
    assert not [words for words in left if "resource_tracker" not in " ".join(words)], (
        "that one is of this process"
    )
    assert not list(Path("/dev/shm").glob(f"lrl-{strategy.run_id}*"))
    assert sorted(group.prompt.id for _, group in witness.groups) == list(range(STEPS * GROUPS))
    assert strategy.choose_transport().backend == "pull"
    assert trainer.callback_metrics["fleet/joined"] == 2
    assert {"worker 0 on far", "worker 1 on far"} <= data.reward_pool.scored_by.keys()
    assert data.reward_pool.scored_by.total() == data.reward_pool.counts["scored"]
