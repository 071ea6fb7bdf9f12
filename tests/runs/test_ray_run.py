"""Real runs whose generator and reward host are tasks of a real Ray cluster, on a node in another network namespace."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest

import lrl
from lrl.callbacks import RolloutLog, Summary, Throughput, WeightSync
from lrl.generators.launchers import Ray
from lrl.runtime.config_errors import ConfigError
from tests.leftovers import MARK, lives, living, wait_for, words
from tests.network_namespace import HERE
from tests.ray_cluster import ADDRESS, RayCluster, ray_cluster
from tests.runs.test_async_run import PROMPTS, RESPONSES, Witness, data_module

pytest.importorskip("ray")

STEPS, GROUPS, LOST_AT = 6, 4, 2
DEADLINE_S = 600.0
KILLED = f"""
import os, signal, sys, time
from pathlib import Path
from lrl.generators.launchers import Ray

launcher = Ray(1, address="{ADDRESS}", resources={{"there": 1}})
launcher.prepare(0, "{HERE}")
words = ["serve", "--join", sys.argv[1], "--host", "0.0.0.0", "--insecure", "--generator", "0"]
launcher.start("generator-0", words, os.environ | {{"LRL_TOKEN": "t" * 32}}, Path("."))
input()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        made.add_node()
        yield made


class LosesItsNode(L.Callback):
    """Kills the node of the generator and of the reward host in mid-run, and brings another one.

    The run's processes carry the mark.
    """

    def __init__(self, cluster: RayCluster, mark: str) -> None:
        self.cluster, self.mark = cluster, mark

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == LOST_AT:
            lost = self.cluster.nodes[-1]
            tops = [*self.named("supervisor.py"), *self.named("lrl score")]
            tree = [*tops, *(child for top in tops for child in top.children(recursive=True))]
            lines = [" ".join(words(process)) for process in tree]
            assert any("EngineCore" in line for line in lines), lines
            assert any("multiprocessing" in line for line in lines), "a reward worker"
            lost.kill("raylet/raylet")
            wait_for(lambda: not any(map(lives, tree)), DEADLINE_S, "the end of what ran on the lost node")
            lost.close()
            self.cluster.add_node()

    def named(self, part: str) -> list[psutil.Process]:
        return [process for process in living(self.mark) if part in " ".join(words(process))]


def test_a_run_whose_ray_node_is_lost_goes_on_with_the_next_node_and_leaves_nothing(
    cluster: RayCluster,
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = lrl.ServerSettings(max_num_seqs=64, dtype="float32", kv_cache_gib=0.1, host=HERE, insecure=True)
    half = {"address": ADDRESS, "cpus": 0.5, "resources": {"there": 0.5}}
    launcher, reward_launcher = (Ray(1, **half) for _ in range(2))  # type: ignore[arg-type]
    strategy = lrl.AsyncSingleDevice(generator_devices=0, launcher=launcher, server=settings, heartbeat_s=5.0)
    monkeypatch.setenv(MARK, strategy.run_id)
    monkeypatch.chdir(tmp_path)
    witness = Witness()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        callbacks=[
            WeightSync(),
            RolloutLog(),
            Throughput(),
            witness,
            LosesItsNode(cluster, strategy.run_id),
            Summary(),
        ],
        max_steps=STEPS,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    rows = PROMPTS[: STEPS * GROUPS]
    data = data_module(groups_per_step=GROUPS, max_lag=1, prompts=rows, reward_launcher=reward_launcher)
    trainer.fit(lrl.PolicyModule(str(policy_folder), lr=5e-4), datamodule=data)
    assert strategy.transport is not None and strategy.transport.backend == "pull"
    assert sorted(group.prompt.id for _, group in witness.groups) == list(range(STEPS * GROUPS))
    assert trainer.callback_metrics["fleet/joined"] == 2
    assert all(rollout.reward == -len(rollout.token_ids) / 64 for _, rollout in witness.rollouts)
    scored_by = data.reward_pool.scored_by
    assert {f"reward host {number} on {socket.gethostname()}" for number in (0, 1)} <= scored_by.keys()
    assert trainer.callback_metrics["rewards/hosts"] == 1 and "scored by" in capsys.readouterr().out
    assert scored_by.total() == data.reward_pool.counts["scored"] >= STEPS * GROUPS * RESPONSES
    left = [said for process in living(strategy.run_id) if (said := words(process))]
    assert not [words for words in left if "resource_tracker" not in " ".join(words)], "that one is of this process"
    assert not list(Path("/dev/shm").glob(f"lrl-{strategy.run_id}*"))


def test_a_task_of_ray_ends_with_a_trainer_that_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    node = cluster.nodes[-1]
    with socket.create_server((HERE, 0)) as silent:  # a run that never answers, so the task waits
        url = f"http://{HERE}:{silent.getsockname()[1]}"
        with subprocess.Popen([sys.executable, "-c", KILLED, url], cwd=tmp_path, stdin=subprocess.PIPE) as trainer:
            try:
                wait_for(lambda: node.processes(url), DEADLINE_S, "the task")
            finally:
                trainer.send_signal(signal.SIGKILL)
        wait_for(lambda: not node.processes(url), DEADLINE_S, "the end of the task")


def test_a_cluster_of_several_nodes_needs_an_address_that_they_reach(cluster: RayCluster) -> None:
    launcher = Ray(1, address=ADDRESS)
    try:
        with pytest.raises(ConfigError, match="strategy.server.host is 127.0.0.1, which the other nodes"):
            launcher.prepare(0, "127.0.0.1")
    finally:
        launcher.close()


def test_what_ray_has_no_place_for_is_named_with_what_its_nodes_have(cluster: RayCluster, tmp_path: Path) -> None:
    launcher = Ray(2, address=ADDRESS, resources={"nowhere": 3})
    launcher.prepare(0, HERE)
    try:
        job = launcher.start("generator-0", ["serve"], {}, tmp_path)
        wait_for(lambda: "no place" in job.tail(), DEADLINE_S, "the reason")
        assert "nowhere: 3" in job.tail() and "there: 1" in job.tail() and job.alive
        job.stop()
        assert not job.alive
    finally:
        launcher.close()
