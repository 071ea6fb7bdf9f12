"""Ranks on two machines (network namespaces) meet, or end with who is missing."""

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
        yield found


@pytest.fixture
def start(machines: tuple[Machine, Machine], tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with nodes(tmp_path) as start_node:
        yield lambda number, timeout_s, *words, **variables: start_node(
            number, machines[number % 2], meet, timeout_s, *words, **variables
        )


def met(machines: tuple[Machine, Machine], own: int) -> str:
    cable = machines[own].cable
    return f"met by {cable} ={cable}"


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
    for node, number in zip((first, second, third), (0, 0, 1), strict=True):
        assert met(machines, number) in node.said


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
    only = start(number, 2.0)
    assert only.status() == 1
    assert words in only.said and "Traceback" not in only.said


def test_a_node_that_waits_for_the_checks_of_rank_0_ends_with_it(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    with nodes(tmp_path) as start_node:
        both = [start_node(number, machines[number], await_rank_0) for number in range(2)]
        assert [node.status() for node in both] == [1, 1]
        assert "data.temperature is 0" in both[0].said and "DistNetworkError" in both[1].said
