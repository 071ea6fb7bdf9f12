"""A run on two machines (network namespaces) that share no folder: how it meets or ends with who is
missing, trains, and ends when one is gone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

import lrl
from lrl.errors import ConfigError
from lrl.strategies import several_ranks
from lrl.strategies.several_ranks import GLOO, NCCL
from tests.network_namespace import Machine, two_machines
from tests.strategies import run_of_ranks
from tests.strategies.forked_ranks import (
    DEADLINE_S,
    PORT,
    RANK_0,
    Fork,
    as_slurm,
    as_torchrun,
    nodes,
)
from tests.strategies.run_of_ranks import Telling, WaitsAt, told

SILENCE_S = 4.0
LONG_S = 120.0
"""A deadline that no test reaches, on a machine however busy."""


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as found:
        yield found


@pytest.fixture
def start(machines: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Callable[..., Fork]]:
    with nodes(tmp_path) as start_node:
        yield lambda number, *words, **how: start_node(number, machines[number % 2], *words, **how)


def fit(strategy: str, model: Path, steps: int, *waits: int, **settings: Any) -> None:
    """Fits a policy on both nodes, so that what is looked at is how they meet and end."""
    callbacks = (Telling(), *map(WaitsAt, waits))
    how: dict[str, Any] = {"ranks": 2, "nodes": 2, "strategy": strategy, "heartbeat_s": SILENCE_S}
    run_of_ranks.fit(str(model), ".", *callbacks, steps=steps, **how | settings)


def met(timeout_s: float) -> Any:
    strategy = lrl.AsyncDDP(generator_devices=0, meeting_timeout_s=timeout_s, heartbeat_s=3.0)
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.num_nodes = int(os.environ["WORLD_SIZE"])
    strategy.meet()
    return strategy._store


def meet(timeout_s: float) -> None:
    several_ranks.ANSWER_S = 3.0
    store = met(timeout_s)
    print("met by", os.environ[GLOO], os.environ[NCCL], flush=True)
    store.set(f"left/{os.environ['RANK']}", "")
    if os.environ["RANK"] == "0":  # the store ends with it
        everyone = [f"left/{one}" for one in range(int(os.environ["WORLD_SIZE"]))]
        store.wait(everyone, timedelta(seconds=DEADLINE_S))


def await_rank_0() -> None:
    """Meets, and waits until rank 0 has made its checks, in which that finds a fault."""
    _store = met(DEADLINE_S)
    if os.environ["RANK"] == "0":
        time.sleep(2)
        raise ConfigError("data.temperature is 0.")
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))


@pytest.mark.parametrize(
    ("strategy", "settings", "started_by"),
    [
        ("AsyncDDP", {}, as_torchrun),
        ("AsyncFSDP", {"save_distributed_checkpoint": False}, as_slurm),
    ],
)
def test_two_nodes_train_the_same_policy_without_a_shared_folder_and_both_notice_that_their_network_is_gone(
    strategy: str,
    settings: dict[str, Any],
    started_by: Callable[[int], dict[str, str]],
    machines: tuple[Machine, Machine],
    start: Callable[..., Fork],
    policy_folder: Path,
    tmp_path: Path,
) -> None:
    mine, models = tmp_path / "node-0", tmp_path / "models"
    mine.mkdir()
    shutil.copytree(policy_folder, models / "policy")
    program = partial(fit, strategy, models / "policy", 10_000, 3, **settings)
    second = start(1, program, hidden=(models, mine), started_by=started_by)
    first = start(0, program, started_by=started_by)
    for node in (first, second):
        node.wait_for("step 3: ")
    machines[1].cut()
    for number in range(2):
        (tmp_path / f"node-{number}" / "go").touch()
    assert [first.wait(), second.wait()] == [1, 1]
    for node in (first, second):
        assert "has ended or cannot be reached" in node.printed(), node.printed()
        assert "Traceback" not in node.printed()
    weights = [[line["weights"] for line in told(one.printed())[:3]] for one in (first, second)]
    assert weights[0] == weights[1] and len(set(weights[0])) == 3
    assert {path.name for path in (tmp_path / "node-1").iterdir()} == {"output", "go"}


def test_parts_of_a_checkpoint_on_folders_that_are_not_shared_are_refused_on_both_nodes(
    start: Callable[..., Fork], policy_folder: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "node-0"
    mine.mkdir()
    both = [start(0, fit, "AsyncFSDP", policy_folder, 3)]
    both.append(start(1, fit, "AsyncFSDP", policy_folder, 3, hidden=(mine,)))
    assert [node.wait() for node in both] == [1, 1]
    for node in both:
        assert f"does not see '{mine}/.lrl-" in node.printed()
        assert "set strategy.save_distributed_checkpoint to false" in node.printed()
        assert "Traceback" not in node.printed()
    assert [path.name for path in mine.iterdir()] == ["output"]


def test_a_resume_from_a_file_that_one_node_does_not_see_is_refused_on_both(
    start: Callable[..., Fork], policy_folder: Path, tmp_path: Path
) -> None:
    both = [start(number, fit, "AsyncDDP", policy_folder, 2) for number in range(2)]
    assert [node.wait() for node in both] == [0, 0], [node.printed() for node in both]
    saved = tmp_path / "node-0" / "step=2.ckpt"
    program = partial(fit, "AsyncDDP", policy_folder, 3, ckpt_path=str(saved))
    both = [start(0, program), start(1, program, hidden=(saved.parent,))]
    assert [node.wait() for node in both] == [1, 1]
    for node in both:
        assert "rank 1 on" in node.printed()
        assert f"does not see {str(saved)!r}" in node.printed()
        assert "Traceback" not in node.printed()


def test_ranks_whose_own_machine_leads_them_to_themselves_take_the_interface_that_the_others_reach(
    machines: tuple[Machine, Machine], start: Callable[..., Fork]
) -> None:
    to_itself = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3"}
    first = start(0, meet, LONG_S, **to_itself)
    second = start(2, meet, LONG_S, RANK="1", **to_itself)
    third = start(1, meet, LONG_S, RANK="2", WORLD_SIZE="3")
    for node, number in ((first, 0), (second, 0), (third, 1)):
        assert node.wait() == 0, node.printed()
        cable = machines[number].cable
        assert f"met by {cable} ={cable}" in node.printed()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "rank 1 (node 1) has not come"),
        (1, f"MASTER_ADDR is {RANK_0} and MASTER_PORT {PORT}: "),
    ],
)
def test_a_node_without_the_other_says_at_its_deadline_who_or_where_is_missing(
    start: Callable[..., Fork], number: int, words: str
) -> None:
    only = start(number, meet, 2.0)
    assert only.wait() == 1
    assert words in only.printed() and "Traceback" not in only.printed()


def test_a_node_that_waits_for_the_checks_of_rank_0_ends_with_it(
    start: Callable[..., Fork],
) -> None:
    both = [start(number, await_rank_0) for number in range(2)]
    assert [node.wait() for node in both] == [1, 1]
    assert "data.temperature is 0" in both[0].printed() and "DistNetworkError" in both[1].printed()
