"""The tree in which generators fetch a version."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from lrl.planning import clock
from lrl.weights.upload_slots import FAN_OUT, UploadSlots

STALL_S = 60.0


class Child:
    """A generator that is only its address."""

    def __init__(self, host: str) -> None:
        self.client: Any = self
        self.url = f"http://{host}:1"
        self.eviction = None


def children(count: int) -> list[Any]:
    return [Child(f"10.0.0.{number}") for number in range(count)]


async def fetch_all(fleet: list[Any], slots: UploadSlots, stuck: int = 0) -> dict[Any, Any]:
    """Has all but the first `stuck` fetch; returns the source of each, None for the trainer."""
    found: dict[Any, Any] = {}

    async def fetch(child: Any) -> None:
        async with slots.take(child) as source:
            await asyncio.sleep(0.001 if child not in fleet[:stuck] else 600)
            found[child] = source
        await slots.open_at(child)

    works = [asyncio.create_task(fetch(child)) for child in fleet]
    await asyncio.wait_for(asyncio.gather(*works[stuck:]), 60)
    for work in works[:stuck]:
        work.cancel()
    return found


def test_the_trainer_serves_the_first_and_those_that_have_the_version_the_others() -> None:
    served = Counter(asyncio.run(fetch_all(children(32), UploadSlots(STALL_S))).values())
    assert served.total() == 32 and FAN_OUT <= served[None] <= 16 and len(served) > 4


def test_one_that_stands_still_holds_one_place_and_nobody_else() -> None:
    assert (
        len(asyncio.run(fetch_all(children(8), UploadSlots(STALL_S), stuck=FAN_OUT - 1)))
        == 8 - FAN_OUT + 1
    )


def test_when_all_places_are_held_the_trainer_opens_another_one() -> None:
    assert len(asyncio.run(fetch_all(children(8), UploadSlots(0.01), stuck=FAN_OUT))) == 8 - FAN_OUT


def test_in_a_tree_that_takes_longer_than_a_stall_rank_0_still_serves_few() -> None:
    fleet, served = children(500), Counter[bool]()
    slots = UploadSlots(STALL_S)

    async def fetch(child: Any) -> None:
        async with slots.take(child) as source:
            served[source is None] += 1
            await asyncio.sleep(0.6 * STALL_S)
        await slots.open_at(child)

    async def scene() -> float:
        await asyncio.gather(*map(fetch, fleet))
        return asyncio.get_running_loop().time()

    assert clock.run(scene()) > 3 * STALL_S
    assert served.total() == 500 and served[True] <= 20


def test_nobody_fetches_from_a_generator_that_was_evicted() -> None:
    fleet, slots = children(2), UploadSlots(STALL_S)

    async def scene() -> Any:
        await slots.open_at(fleet[0])
        fleet[0].eviction = "it is gone"
        async with slots.take(fleet[1]) as source:
            return source

    assert asyncio.run(scene()) is None


@pytest.mark.parametrize(
    ("parent", "child", "serves"),
    [
        ("10.0.0.7", "10.0.0.8", True),
        ("[fd00::7]", "[fd00::8]", True),
        ("127.0.0.1", "127.0.0.1", False),
        ("10.0.0.7", "127.0.0.1", False),
        ("127.0.0.1", "10.0.0.8", False),
        ("[::1]", "[fd00::8]", False),
        ("localhost", "localhost", False),
    ],
)
def test_generators_on_the_trainers_machine_neither_serve_others_nor_are_served(
    parent: str, child: str, serves: bool
) -> None:
    first: Any = Child(parent)

    async def scene() -> Any:
        slots = UploadSlots(STALL_S)
        await slots.open_at(first)
        second: Any = Child(child)
        async with slots.take(second) as source:
            return source

    assert asyncio.run(scene()) is (first if serves else None)


def test_generators_on_the_trainers_machine_wait_for_nobody() -> None:
    fleet: list[Any] = [Child("127.0.0.1") for _ in range(8)]
    found, arrived = [], asyncio.Barrier(len(fleet))

    async def fetch(child: Any, slots: UploadSlots) -> None:
        async with slots.take(child) as source:
            found.append(source)
            await arrived.wait()

    async def scene() -> None:
        slots = UploadSlots(STALL_S)
        await asyncio.wait_for(asyncio.gather(*(fetch(child, slots) for child in fleet)), 60)

    asyncio.run(scene())
    assert found == [None] * 8
