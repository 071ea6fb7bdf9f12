"""A run on two machines (network namespaces) that share no folder: how it meets or ends with who is
missing, trains, and ends when one is gone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.network_namespace import Machine, two_machines
from tests.strategies.node_of_two import (
    PORT,
    Node,
    as_slurm,
    as_torchrun,
    await_rank_0,
    fit,
    meet,
    nodes,
)

SILENCE_S = 4.0
LONG_S = 120.0
"""A deadline that no test reaches, on a machine however busy."""


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as found:
        yield found


@pytest.fixture
def start(machines: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with nodes(tmp_path) as start_node:
        yield lambda number, *words, **how: start_node(number, machines[number % 2], *words, **how)


def steps(node: Node) -> list[str]:
    return re.findall(r"^step .*$", node.said, re.MULTILINE)


def fitting(strategy: str, model: Path, steps: int, ckpt_path: str | None = None) -> None:
    parts = {} if strategy == "AsyncDDP" else {"save_distributed_checkpoint": False}
    fit(strategy, str(model), steps, ckpt_path, steps > 3, heartbeat_s=SILENCE_S, **parts)


@pytest.mark.parametrize(
    ("strategy", "started_by"), [("AsyncDDP", as_torchrun), ("AsyncFSDP", as_slurm)]
)
def test_two_nodes_train_the_same_policy_without_a_shared_folder_and_both_notice_that_their_network_is_gone(
    strategy: str,
    started_by: Callable[[int], dict[str, str]],
    machines: tuple[Machine, Machine],
    start: Callable[..., Node],
    policy_folder: Path,
    tmp_path: Path,
) -> None:
    mine, models = tmp_path / "node-0", tmp_path / "models"
    mine.mkdir()
    shutil.copytree(policy_folder, models / "policy")
    words = (fitting, strategy, models / "policy", 10_000)
    second = start(1, *words, hidden=(models, mine), started_by=started_by)
    first = start(0, *words, started_by=started_by)
    for node in (first, second):
        node.wait_for("step 3: ")
    machines[1].cut()
    for number in range(2):
        (tmp_path / f"node-{number}" / "go").touch()
    assert [first.status(), second.status()] == [1, 1]
    for node in (first, second):
        assert "has ended or cannot be reached" in node.said, node.said
        assert "Traceback" not in node.said
    assert steps(first)[:3] == steps(second)[:3]
    assert {path.name for path in (tmp_path / "node-1").iterdir()} == {"output", "go"}


def test_parts_of_a_checkpoint_on_folders_that_are_not_shared_are_refused_on_both_nodes(
    start: Callable[..., Node], policy_folder: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "node-0"
    mine.mkdir()
    both = [start(0, fit, "AsyncFSDP", str(policy_folder), 3)]
    both.append(start(1, fit, "AsyncFSDP", str(policy_folder), 3, hidden=(mine,)))
    assert [node.status() for node in both] == [1, 1]
    for node in both:
        assert f"does not see '{mine / 'saved'}" in node.said
        assert "set strategy.save_distributed_checkpoint to false" in node.said
        assert "Traceback" not in node.said
    assert list(mine.glob("saved/*")) == list(mine.glob("saved/.*")) == []


def test_a_resume_from_a_file_that_one_node_does_not_see_is_refused_on_both(
    start: Callable[..., Node], policy_folder: Path, tmp_path: Path
) -> None:
    both = [start(number, fitting, "AsyncDDP", policy_folder, 2) for number in range(2)]
    assert [node.status() for node in both] == [0, 0], [node.said for node in both]
    (saved,) = (tmp_path / "node-0" / "saved").glob("*.ckpt")
    hidden = (tmp_path / "node-0",)
    both = [start(0, fitting, "AsyncDDP", policy_folder, 3, str(saved))]
    both.append(start(1, fitting, "AsyncDDP", policy_folder, 3, str(saved), hidden=hidden))
    assert [node.status() for node in both] == [1, 1]
    for node in both:
        assert "rank 1 on" in node.said and f"does not see {str(saved)!r}" in node.said
        assert "Traceback" not in node.said


def test_ranks_whose_own_machine_leads_them_to_themselves_take_the_interface_that_the_others_reach(
    machines: tuple[Machine, Machine], start: Callable[..., Node]
) -> None:
    to_itself = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3"}
    first = start(0, meet, LONG_S, **to_itself)
    second = start(2, meet, LONG_S, RANK="1", **to_itself)
    third = start(1, meet, LONG_S, RANK="2", WORLD_SIZE="3")
    for node, number in ((first, 0), (second, 0), (third, 1)):
        assert node.status() == 0, node.said
        cable = machines[number].cable
        assert f"met by {cable} ={cable}" in node.said


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "rank 1 (node 1) has not come"),
        (1, f"MASTER_ADDR is 10.213.0.1 and MASTER_PORT {PORT}: "),
    ],
)
def test_a_node_without_the_other_says_at_its_deadline_who_or_where_is_missing(
    start: Callable[..., Node], number: int, words: str
) -> None:
    only = start(number, meet, 2.0)
    assert only.status() == 1
    assert words in only.said and "Traceback" not in only.said


def test_a_node_that_waits_for_the_checks_of_rank_0_ends_with_it(
    start: Callable[..., Node],
) -> None:
    both = [start(number, await_rank_0) for number in range(2)]
    assert [node.status() for node in both] == [1, 1]
    assert "data.temperature is 0" in both[0].said and "DistNetworkError" in both[1].said
