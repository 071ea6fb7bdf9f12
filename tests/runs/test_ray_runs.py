"""Real runs on two nodes of a real Ray cluster, one of them in another network namespace: with its
tasks as generator and worker, and all by one command.

A cluster takes a core half a minute to start, so all tests have the same. The command runs beside the
cluster's head, and Ray chooses which is node 0.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import lrl
from lrl.cli.ray import remove
from lrl.generators.supervisor import SHM
from lrl.members.launchers import Ray
from lrl.run import Run
from tests.leftovers import (
    MARK,
    engines,
    left_in_shared_memory,
    lives,
    living,
    others_living,
    wait_for,
    wait_for_none,
    words,
)
from tests.network_namespace import HERE, THERE
from tests.ray_cluster import ADDRESS, SETTINGS, RayCluster, ray_cluster
from tests.runs.test_async_run import RESPONSES, SMALL, Before, train_every_prompt_once

ray = pytest.importorskip("ray")

LOST_AT = 2
DEADLINE_S = 500.0
TRAINED = 3
"""Steps after which a command is ended."""
OWN = """
model:
  class_path: lrl.PolicyModule
data:
  class_path: lrl.RolloutDataModule
  init_args:
    prompts: {class_path: lrl.Prompts, init_args: {source: "lrl.quickstart.task:problems"}}
    rewards:
      - class_path: lrl.rewards.Function
        init_args: {function: "tests.odd_lengths:slow_brevity"}
    groups_per_step: 2
    rollouts_per_group: 2
    max_prompt_tokens: 32
    max_response_tokens: 16
    reward_workers: 1
trainer:
  accelerator: cpu
  devices: 1
  strategy:
    class_path: lrl.AsyncDDP
    init_args:
      generator_devices: 0
      heartbeat_s: 5.0
      server: {max_num_seqs: 16, dtype: float32, kv_cache_gib: 0.1, host: 0.0.0.0, insecure: true}
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: ., flush_logs_every_n_steps: 1}
  max_steps: 100000
  max_epochs: -1
  enable_model_summary: false
"""
"""A small run that never ends by itself."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        made.add_node()
        yield made


def test_a_run_whose_ray_node_is_lost_goes_on_with_the_next_node_and_leaves_nothing(
    cluster: RayCluster, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = lrl.ServerSettings(**SMALL, host=HERE, insecure=True)
    half = {"address": ADDRESS, "cpus": 0.5, "resources": {"there": 0.5}}
    launcher, worker_launcher = (Ray(1, **half) for _ in range(2))  # type: ignore[arg-type]
    strategy = lrl.AsyncSingleDevice(
        generator_devices=0, launcher=launcher, server=settings, heartbeat_s=5.0
    )
    monkeypatch.setenv(MARK, strategy.run_id)
    monkeypatch.chdir(tmp_path)

    def tops(part: str) -> list[psutil.Process]:
        return [one for one in living(strategy.run_id) if part in " ".join(words(one))]

    def tree() -> list[psutil.Process]:
        """An engine's title is where its environment was: it is found as a child."""
        found = [*tops("supervisor.py"), *tops("--kind worker")]
        return [*found, *(child for top in found for child in top.children(recursive=True))]

    def lose_the_node(run: Run) -> None:
        # On a busy machine the generator may have been evicted, and be starting again.
        wait_for(lambda: any(map(engines, tops("supervisor.py"))), DEADLINE_S, "the engine")
        of_pool = "multiprocessing"
        wait_for(
            lambda: any(of_pool in " ".join(words(one)) for one in tree()), DEADLINE_S, "a worker"
        )
        lost, on_it = cluster.nodes[-1], tree()
        lost.kill("raylet/raylet")
        wait_for(lambda: not any(map(lives, on_it)), DEADLINE_S, "the end of what ran on the node")
        lost.close()
        cluster.add_node()

    trainer, witness = train_every_prompt_once(
        strategy,
        policy_folder,
        tmp_path,
        Before({2: lose_the_node}),
        devices=1,
        steps=6,
        groups=4,
        max_lag=1,
        worker_launcher=worker_launcher,
    )
    metrics, pool = trainer.callback_metrics, trainer.datamodule.reward_pool  # type: ignore[attr-defined]
    assert strategy.choose_transport().backend == "pull" and metrics["fleet/joined"] >= 2
    assert all(rollout.reward == -len(rollout.token_ids) / 64 for _, rollout in witness.rollouts)
    assert {f"worker {number} on {socket.gethostname()}" for number in (0, 1)} <= {*pool.scored_by}
    assert metrics["rewards/scorers"] == 1
    said = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert re.search(rf"node 0 \([^,]+, {THERE}\) is lost: .+ The run ends", said)
    assert pool.scored_by.total() == pool.counts["scored"] >= 6 * 4 * RESPONSES
    assert not others_living(strategy.run_id)


def test_places_that_are_given_back_at_once_are_free_again(cluster: RayCluster) -> None:
    """Nodes kept some of them, and the runs behind waited for ever."""
    ray.init(address=ADDRESS, log_to_driver=False, logging_level="ERROR")
    try:
        for _ in range(50):
            remove(ray.util.placement_group([{"CPU": 1.0}], strategy="STRICT_SPREAD"))
        of_all = ray.cluster_resources()["CPU"]
        wait_for(
            lambda: ray.available_resources().get("CPU") == of_all,
            60.0,
            "the cores that were given back",
        )
    finally:
        ray.shutdown()


def steps_done(folder: Path) -> int:
    tables = list(folder.glob("**/metrics.csv"))
    return len(tables[0].read_text().splitlines()) - 1 if tables else 0


def test_a_command_with_a_generator_that_ray_places_is_stopped_killed_and_leaves_a_checkpoint_alone(
    cluster: RayCluster, policy_folder: Path, tmp_path: Path
) -> None:
    """As by `ray job stop`; a killed command alone is the end of a lost head, too."""
    (tmp_path / "own.yaml").write_text(OWN)
    before, mark, output = set(os.listdir(SHM)), uuid.uuid4().hex, tmp_path / "output"
    program = str(Path(sys.executable).with_name("lrl"))
    command = f"ray --nodes 2 --gpus 0 --cpus 0.5 --address {ADDRESS} fit --config own.yaml".split()
    launcher = "--trainer.strategy.launcher"
    command += [launcher, "Ray", f"{launcher}.jobs", "1", f"{launcher}.cpus", "0.5"]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [program, *command, "--model.model", policy_folder],
            cwd=tmp_path,
            stdout=file,
            stderr=file,
            env=os.environ | SETTINGS | {MARK: mark},
        )

    def ended() -> bool:
        return process.poll() is not None

    try:
        wait_for(lambda: steps_done(tmp_path) >= TRAINED or ended(), DEADLINE_S, "some steps")
        said = output.read_text()
        assert not ended(), said
        assert {HERE, THERE} <= set(re.findall(r"node [01] \([^,]+, ([\d.]+)\)", said))
        assert "Starting with 2 processes" in said
        assert {"[node 0]", "[node 1]"} <= {line[:8] for line in said.splitlines()}
        process.send_signal(signal.SIGTERM)
        last_words = "SIGTERM: the run saves a checkpoint and ends"
        wait_for(lambda: last_words in output.read_text(), DEADLINE_S, last_words)
    finally:
        process.kill()
        process.wait()
        wait_for_none(lambda: map(words, living(mark)), DEADLINE_S, "its processes")
    assert len(list(tmp_path.glob("**/last-step=*.ckpt"))) == 1, output.read_text()
    wait_for_none(
        lambda: [one for one in left_in_shared_memory(before) if "lrl-" in one],
        DEADLINE_S,
        "its files",
    )
