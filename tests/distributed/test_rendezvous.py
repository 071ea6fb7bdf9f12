"""Ranks on two machines (network namespaces) meet, or end with the reason, on both.

Covers lrl/distributed/interface.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.network_namespace import Machine, two_machines
from tests.strategies.node_of_two import PORT, Node, await_rank_0, meet, nodes

LONG_S = 120.0
"""A deadline that no test reaches, on a machine however busy."""


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as found:
        found[0].add_interface("apart", "10.98.0.1")
        found[1].add_interface("apart", "10.99.0.1")
        yield found


@pytest.fixture
def start(machines: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with nodes(tmp_path) as start_node:
        yield lambda number, timeout_s, *words, **variables: start_node(
            number, machines[number % 2], meet, timeout_s, *words, **variables
        )


def met(machines: tuple[Machine, Machine], own: int) -> str:
    cable = machines[own].cable
    return f"met {[(one.address, one.cable) for one in machines]} {cable} ={cable}"


def test_each_node_finds_the_interface_that_leads_to_the_other(
    machines: tuple[Machine, Machine], start: Callable[..., Node]
) -> None:
    both = [start(number, LONG_S) for number in range(2)]
    assert [node.status() for node in both] == [0, 0], [node.said for node in both]
    assert [met(machines, number) in node.said for number, node in enumerate(both)] == [True, True]


def test_ranks_whose_own_machine_leads_them_to_themselves_take_the_interface_that_the_others_reach(
    machines: tuple[Machine, Machine], start: Callable[..., Node]
) -> None:
    to_itself = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "3"}
    first, second = start(0, LONG_S, **to_itself), start(2, LONG_S, RANK="1", **to_itself)
    third = start(1, LONG_S, RANK="2", WORLD_SIZE="3")
    assert [node.status() for node in (first, second, third)] == [0, 0, 0], [
        first.said,
        second.said,
        third.said,
    ]
    rows = [(machines[number].address, machines[number].cable) for number in (0, 0, 1)]
    for node, (_, cable) in zip((first, second, third), rows, strict=True):
        assert f"met {rows} {cable} ={cable}" in node.said


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("variable", "value"), [("GLOO_SOCKET_IFNAME", "eth77"), ("NCCL_SOCKET_IFNAME", "=eth77")]
)
def test_an_interface_that_a_node_does_not_have_ends_both_with_the_setting_and_the_remedy(
    start: Callable[..., Node], number: int, variable: str, value: str
) -> None:
    both = {
        number: start(number, LONG_S, **{variable: value}),
        1 - number: start(1 - number, LONG_S),
    }
    wrong, other = both[number], both[1 - number]
    wrong.wait_for(f"{variable} is {value!r}, and this machine")
    assert wrong.status() == 1 and "eave it out" in wrong.said and "Traceback" not in wrong.said
    if number == 1:
        assert (
            other.status() == 1
            and "rank 1 (node 1) on" in other.said.lower()
            and value in other.said
        )


@pytest.mark.parametrize("number", [0, 1])
def test_an_interface_that_leads_to_no_other_node_ends_both(
    start: Callable[..., Node], number: int
) -> None:
    set_here = {"GLOO_SOCKET_IFNAME": "apart"}
    both = [start(one, LONG_S, **(set_here if one == number else {})) for one in range(2)]
    assert [node.status() for node in both] == [1, 1]
    for node in both:
        assert (
            "cannot connect" in node.said
            and "(apart)" in node.said
            and "Leave GLOO_SOCKET_IFNAME out" in node.said
        )
        assert "Traceback" not in node.said


def test_a_node_that_comes_late_is_waited_for_and_named_meanwhile(
    start: Callable[..., Node],
) -> None:
    first = start(0, LONG_S)
    first.wait_for(
        "1 of 2 ranks have come to the meeting at 10.213.0.1:29500; rank 1 (node 1) has not"
    )
    second = start(1, LONG_S)
    assert [first.status(), second.status()] == [0, 0], [first.said, second.said]


def test_a_second_node_without_a_first_says_at_its_deadline_where_nobody_answers(
    start: Callable[..., Node],
) -> None:
    only = start(1, 2.0)
    assert only.status() == 1
    assert (
        f"nobody answers at MASTER_ADDR:MASTER_PORT, 10.213.0.1:{PORT}" in only.said
        and "Traceback" not in only.said
    )
    assert "strategy.meeting_timeout_s (2)" in only.said


def test_a_first_node_without_a_second_says_at_its_deadline_which_rank_has_not_come(
    start: Callable[..., Node],
) -> None:
    only = start(0, 2.0)
    assert only.status() == 1
    assert (
        "1 of 2 ranks have come to the meeting at 10.213.0.1:29500; rank 1 (node 1) has not"
        in only.said
    )
    assert "strategy.meeting_timeout_s (2)" in only.said and "Traceback" not in only.said


def test_a_port_that_another_process_has_is_named_at_once(start: Callable[..., Node]) -> None:
    first = start(0, LONG_S)
    first.wait_for("rank 1 (node 1) has not")
    assert start(0, LONG_S).status() == 1
    assert f"MASTER_PORT is {PORT}, which rank 0 (node 0) on" in first.said


def test_a_fault_that_rank_0_finds_in_its_checks_ends_the_node_that_waits_for_it_with_that_fault(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    with nodes(tmp_path) as start_node:
        both = [start_node(number, machines[number], await_rank_0, 1.0) for number in range(2)]
        assert [node.status() for node in both] == [1, 1]
        assert "Rank 0 (node 0) on" in both[1].said and "data.temperature is 0." in both[1].said
        assert "Traceback" not in both[0].said + both[1].said


def test_a_node_that_waits_for_the_checks_of_rank_0_notices_that_its_machine_is_gone(
    tmp_path: Path,
) -> None:
    with two_machines() as machines, nodes(tmp_path) as start_node:
        both = [start_node(number, machines[number], await_rank_0, 1000.0) for number in range(2)]
        for node in both:
            node.wait_for("met")
        machines[0].cut()
        assert both[1].status() == 1
        assert "rank 0, or its machine, is gone" in both[1].said and "Traceback" not in both[1].said
