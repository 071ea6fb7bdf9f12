"""Real runs on two nodes of a real Ray cluster, each started by one command: how they train and how they end.

One node is in another network namespace. The command runs beside the cluster's head, and Ray chooses which is node 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lrl.cli import ray
from lrl.generators.supervisor import SHM
from tests.leftovers import MARK, left_in_shared_memory, living, wait_for, wait_for_none, words
from tests.network_namespace import HERE, THERE
from tests.ray_cluster import ADDRESS, SETTINGS, RayCluster, ray_cluster

pytest.importorskip("ray")

DEADLINE_S = 500.0
TRAINED = 3
"""Steps after which a run is broken."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        made.add_node()
        yield made


@dataclass
class Command:
    """A running `lrl ray`, and what carries its mark: all of its processes, on both nodes."""

    process: subprocess.Popen[bytes]
    folder: Path
    mark: str

    @property
    def said(self) -> str:
        return (self.folder / "output").read_text()

    def trains(self) -> None:
        """Waits until it has done some steps."""
        wait_for(lambda: self.steps() >= TRAINED or self.process.poll() is not None, DEADLINE_S, "some steps")
        assert self.process.poll() is None, self.said

    def steps(self) -> int:
        tables = list(self.folder.glob("**/metrics.csv"))
        return len(tables[0].read_text().splitlines()) - 1 if tables else 0

    def leaves_nothing(self) -> None:
        """Waits until no process and no file is left, on either node."""
        wait_for_none(lambda: [words(one) for one in living(self.mark)], DEADLINE_S, "its processes")

    def checkpoints(self) -> list[Path]:
        return list(self.folder.glob("**/last-step=*.ckpt"))


@pytest.fixture
def start(cluster: RayCluster, policy_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `lrl ray` with a small run that never ends by itself."""
    started: list[Command] = []
    before = set(os.listdir(SHM))

    def run(*words: str) -> Command:
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings(policy_folder)))
        program = str(Path(sys.executable).with_name("lrl"))
        command = [program, "ray", "--nodes", "2", "--cpus", "0.5", "--address", ADDRESS]
        mark = uuid.uuid4().hex
        with (tmp_path / "output").open("wb") as output:
            process = subprocess.Popen(
                [*command, "fit", "--config", "own.yaml", *words],
                cwd=tmp_path,
                stdout=output,
                stderr=output,
                env=os.environ | SETTINGS | {MARK: mark},
            )
        started.append(Command(process, tmp_path, mark))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()
        one.leaves_nothing()
    wait_for_none(lambda: [one for one in left_in_shared_memory(before) if "lrl-" in one], DEADLINE_S, "its files")


def settings(policy: Path) -> dict[str, Any]:
    server = {"max_num_seqs": 16, "dtype": "float32", "kv_cache_gib": 0.1}
    strategy = {"generator_devices": 0, "heartbeat_s": 5.0, "server": server}
    reward = {"class_path": "lrl.rewards.Function", "init_args": {"function": "tests.odd_lengths:slow_brevity"}}
    logger = {"save_dir": ".", "flush_logs_every_n_steps": 1}
    return {
        "model": {"class_path": "lrl.PolicyModule", "init_args": {"model": str(policy)}},
        "data": {
            "class_path": "lrl.RolloutDataModule",
            "init_args": {
                "prompts": {"class_path": "lrl.Prompts", "init_args": {"source": "lrl.quickstart.task:problems"}},
                "rewards": [reward],
                "groups_per_step": 2,
                "rollouts_per_group": 2,
                "max_prompt_tokens": 32,
                "max_response_tokens": 16,
                "reward_workers": 1,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "strategy": {"class_path": "lrl.AsyncDDP", "init_args": strategy},
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": logger},
            "max_steps": 100_000,
            "max_epochs": -1,
            "enable_model_summary": False,
        },
    }


def test_one_command_trains_on_two_nodes_with_a_generator_that_ray_places(start: Callable[..., Command]) -> None:
    strategy = "--trainer.strategy"
    command = start(
        *("--trainer.max_steps", "3"),
        *(f"{strategy}.launcher", "Ray", f"{strategy}.launcher.jobs", "1", f"{strategy}.launcher.cpus", "0.5"),
        *(f"{strategy}.server.host", "0.0.0.0", f"{strategy}.server.insecure", "true"),
    )
    assert command.process.wait(DEADLINE_S) == 0, command.said
    assert {HERE, THERE} <= set(re.findall(r"node [01] \([^,]+, ([\d.]+)\)", command.said))
    assert "Starting with 2 processes" in command.said and "| 3/3 [" in command.said
    assert {"[node 0]", "[node 1]"} <= {line[:8] for line in command.said.splitlines()}
    command.leaves_nothing()


def test_a_command_that_gets_a_signal_and_is_killed_leaves_a_checkpoint_and_nothing_else(
    start: Callable[..., Command],
) -> None:
    """As by `ray job stop`; a killed command alone is the end of a lost head, too."""
    command = start()
    command.trains()
    command.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "SIGTERM: the run saves a checkpoint and ends" in command.said, DEADLINE_S, "its last words")
    command.process.kill()
    command.leaves_nothing()
    assert len(command.checkpoints()) == 1, command.said


def test_a_lost_node_ends_the_run_with_a_checkpoint_and_leaves_nothing(
    cluster: RayCluster, start: Callable[..., Command]
) -> None:
    command = start()
    command.trains()
    lost = cluster.nodes[-1]
    lost.kill("raylet/raylet")
    try:
        assert command.process.wait(DEADLINE_S) == 1, command.said
        assert re.search(
            rf"node [01] \([^,]+, {THERE}\) is lost: Ray says: .+ start it again with --ckpt_path", command.said
        )
        command.leaves_nothing()
        assert len(command.checkpoints()) == 1, command.said
    finally:
        lost.close()
        cluster.add_node()


def test_what_ray_has_no_place_for_is_named_with_what_its_nodes_have(
    cluster: RayCluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings(tmp_path)))
    words = ["--nodes", "3", "--cpus", "0.5", "--address", ADDRESS, "--wait_s", "1"]
    assert ray.main([*words, "fit", "--config", str(tmp_path / "own.yaml")]) == 1
    (error,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("lrl: error:"))
    assert "no place for 3 times CPU: 0.5, STRICT_SPREAD (one on each node)" in error and "there: 1" in error


def test_a_lost_head_ends_the_run_with_a_checkpoint_and_leaves_nothing(
    cluster: RayCluster, start: Callable[..., Command]
) -> None:
    """The last test of the file: it leaves no cluster."""
    command = start()
    command.trains()
    head, other = cluster.nodes[0], cluster.nodes[-1]
    head.kill("gcs_server")
    try:
        assert command.process.wait(DEADLINE_S) == 1, command.said
        command.leaves_nothing()
        assert len(command.checkpoints()) == 1, command.said
    finally:
        other.close()
        head.close()
        cluster.nodes.clear()
