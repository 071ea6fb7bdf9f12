"""`lrl doctor --cluster` on two machines (network namespaces): it names each fault on both, before
its deadline."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lrl.cli import doctor, doctor_cluster
from tests.network_namespace import Machine, two_machines
from tests.strategies.node_of_two import Node, as_slurm, nodes

AHEAD_S = 3600.0


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as found:
        yield found


@pytest.fixture
def start(machines: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with nodes(tmp_path) as start_node:
        yield lambda number, program, *words, **how: start_node(
            number, machines[number], program, *words, **how
        )


def ask(*words: str) -> None:
    raise SystemExit(doctor.main([*words, "--cluster"]))


def ask_by_address() -> None:
    raise SystemExit(doctor.main(["--cluster", "10.213.0.1:29600"]))


def ask_with_several_faults(*words: str) -> None:
    real_time, real_packages = time.time, doctor_cluster.packages
    time.time = lambda: real_time() + AHEAD_S  # of this node's process alone
    doctor_cluster.packages = lambda: real_packages() | {"torch": "1.0"}
    ask(*words)


def line(node: Node, name: str) -> str:
    """What it has found out about one part."""
    return next((one for one in node.said.splitlines() if one[9:].startswith(name)), "")


def test_two_nodes_that_can_run_have_no_fault(start: Callable[..., Node], tmp_path: Path) -> None:
    both = [start(number, ask, "--timeout_s", "120", str(tmp_path / "runs")) for number in range(2)]
    assert [node.status() for node in both] == [0, 0], [node.said for node in both]
    for node in both:
        names = (
            "node",
            "interface",
            "meeting",
            "gloo",
            "clock",
            "versions",
            "NCCL",
            "shared folder",
        )
        assert [line(node, name)[:2] for name in names] == ["ok"] * len(names), node.said
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("program", "started_by"), [(ask_by_address, lambda number: {}), (ask, as_slurm)]
)
def test_a_node_finds_its_number_by_the_address_of_the_first_or_by_slurm(
    program: Callable[..., None],
    started_by: Callable[[int], dict[str, str]],
    start: Callable[..., Node],
) -> None:
    both = [start(number, program, started_by=started_by) for number in range(2)]
    assert [node.status() for node in both] == [0, 0], [node.said for node in both]
    assert "rank 1 of 2" in line(both[1], "node")


def test_all_faults_between_two_nodes_are_named_on_both_with_what_to_type(
    start: Callable[..., Node], tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    both = [
        start(0, ask, str(folder)),
        start(1, ask_with_several_faults, str(folder), hidden=(folder,)),
    ]
    assert [node.status() for node in both] == [1, 1]
    clock = line(both[1], "clock")
    found = re.search(r"([\d.]+) s ahead of rank 0's, give or take ([\d.]+)", clock)
    assert clock.startswith("wrong") and found is not None
    assert abs(float(found[1]) - AHEAD_S) <= float(found[2]) + 0.002, clock  # both are rounded
    assert line(both[1], "versions").startswith("wrong") and "torch 1.0 (rank 0: " in line(
        both[1], "versions"
    )
    assert line(both[1], "shared folder").startswith("wrong")
    for words in ("sudo timedatectl set-ntp true", "pip install torch==", f"df {folder}"):
        assert all(f"type: {words}" in node.said for node in both), both[0].said


def test_a_wrong_interface_is_named_on_both_and_a_missing_node_at_the_deadline(
    start: Callable[..., Node],
) -> None:
    both = [start(0, ask), start(1, ask, GLOO_SOCKET_IFNAME="eth77")]
    assert [node.status() for node in both] == [1, 1]
    assert all(
        "GLOO_SOCKET_IFNAME is 'eth77'" in node.said and "unset GLOO_SOCKET_IFNAME" in node.said
        for node in both
    )
    alone = start(0, ask, "--timeout_s", "2")
    assert alone.status() == 1 and "rank 1 (node 1) has not" in line(alone, "meeting")
    late = start(1, ask, "--timeout_s", "2")
    assert late.status() == 1 and "nobody answers at MASTER_ADDR:MASTER_PORT" in line(
        late, "meeting"
    )
