"""A real run whose generator and worker are steps of a real SLURM cluster, on a node in another
namespace.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import lrl
from lrl.members.launchers import Slurm
from lrl.run import Run
from tests.leftovers import MARK, others_living, wait_for
from tests.network_namespace import HERE
from tests.runs.test_async_run import SMALL, Before, train_every_prompt_once
from tests.slurm_cluster import slurm_cluster

ROOT = Path(__file__).parents[2]


def cancel_the_worker(run: Run) -> None:
    jobs = subprocess.check_output(["squeue", "--noheader", "--format=%k"], text=True, timeout=60)
    assert "mine" in jobs.split(), "the generator's option"
    subprocess.run(["scancel", "--name=lrl-worker-0"], check=True, timeout=60)
    members = run.data.reward_pool.workers.members
    next_one = lambda: {member.number for member in members.ready} == {1}  # noqa: E731
    wait_for(next_one, 600.0, "another worker")


def test_a_run_whose_job_slurm_has_cancelled_goes_on_with_another_job_and_leaves_nothing(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = lrl.ServerSettings(**SMALL, host=HERE, insecure=True)
    strategy = lrl.AsyncSingleDevice(
        generator_devices=0,
        launcher=Slurm(1, options=["--comment=mine"]),
        server=settings,
        heartbeat_s=5.0,
    )
    with slurm_cluster(monkeypatch):
        monkeypatch.setenv(MARK, strategy.run_id)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the node imports the reward
        trainer, _ = train_every_prompt_once(
            strategy,
            policy_folder,
            tmp_path / "run",
            Before({2: cancel_the_worker}),
            devices=1,
            steps=5,
            groups=4,
            max_lag=1,
            worker_launcher=Slurm(1),
        )
        assert not others_living(strategy.run_id)
    assert strategy.choose_transport().backend == "pull"
    assert trainer.callback_metrics["fleet/joined"] == 1
    pool = trainer.datamodule.reward_pool  # type: ignore[attr-defined]
    assert {"worker 0 on far", "worker 1 on far"} <= pool.scored_by.keys()
    assert pool.scored_by.total() == pool.counts["scored"]
