"""Half-written responses that move to an idle generator, with a pool of model clients on a virtual
clock."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.generators.pool import GeneratorPool
from lrl.planning.clock import run
from lrl.routing.dispatch import DispatchPolicy, GeneratorLoad, LeastLoaded, Request
from lrl.routing.migration import Migration
from tests.generators.model_fleet import Known, ModelClient, ask, gather, make_pool, resync


def make_moving_crew(
    *capacities: int, migration: Migration | None, dispatch: DispatchPolicy | None = None
) -> tuple[GeneratorPool, list[ModelClient]]:
    dispatch = dispatch or LeastLoaded()
    dispatch.lengths = Known()
    return make_pool(*capacities, dispatch=dispatch, migration=migration)


def answer(pool: GeneratorPool, *seconds: int) -> None:
    """Has the pool write groups whose responses take so long."""
    run(gather([ask(pool, seconds=each, priority=place) for place, each in enumerate(seconds)]))


def left_nothing(pool: GeneratorPool) -> bool:
    """Whether the queue has forgotten all requests, and every slot is free."""
    return not pool.requests._targets and not any(
        one.load or one.in_flight for one in pool.generators
    )


def test_an_idle_generator_continues_half_written_responses_after_their_tokens() -> None:
    pool, (first, second) = make_moving_crew(8, 8, migration=Migration())
    answer(pool, 100, 3, 90, 3)
    assert [(len(one.rollouts), one.had) for one in first.asked] == [(2, 0), (2, 0)]
    asked = [(len(one.rollouts), one.had, one.priority) for one in second.asked]
    assert asked == [(2, 0, 1), (2, 0, 3), (1, 3, 0), (1, 3, 0)], "one moved, the longest"
    assert pool.requests.moved == 2 and pool.reissued == 0
    assert left_nothing(pool)


@pytest.mark.parametrize(
    ("migration", "known"),
    [
        (Migration(prefill_ms=1.0), True),
        (Migration(margin=50.0), True),
        (Migration(), False),
        (None, True),
    ],
)
def test_a_response_whose_move_costs_more_than_it_gains_stays(
    migration: Migration | None, known: bool
) -> None:
    pool, (_, second) = make_moving_crew(8, 8, migration=migration)
    pool.requests.dispatch.lengths = Known() if known else None
    answer(pool, 100, 3, 90, 3)
    assert pool.requests.moved == 0 and len(second.asked) == 2


def test_no_response_moves_while_a_request_waits() -> None:
    class HoldsThree(LeastLoaded):
        def pick(self, request: Request, generators: Sequence[GeneratorLoad]) -> int | None:
            held = request.responses == 3 and not released
            return None if held else super().pick(request, generators)

    pool, _ = make_moving_crew(8, 8, migration=Migration(), dispatch=HoldsThree())
    released = False

    async def scene() -> None:
        nonlocal released
        questions = [
            asyncio.create_task(ask(pool, n, seconds))
            for n, seconds in ((2, 100), (2, 3), (2, 100), (3, 9))
        ]
        await asyncio.sleep(9.5)
        assert pool.requests.moved == 0 and pool.generators[1].in_flight == 0
        released = True
        pool.requests.send_soon()
        await asyncio.wait(questions)

    run(scene())
    assert pool.requests.moved > 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2, 8), min_size=2, max_size=3),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 60)), min_size=2, max_size=16),
    st.lists(st.floats(0.5, 70), max_size=3),
)
def test_no_response_moves_twice_under_a_version_and_none_loses_a_token(
    capacities: list[int], groups: list[tuple[int, int]], syncs: list[float]
) -> None:
    pool, clients = make_moving_crew(*capacities, migration=Migration(prefill_ms=0.0, margin=1.0))

    async def sync(version: int, at: float) -> None:
        await asyncio.sleep(at)
        await resync(pool, version)

    questions = [ask(pool, n, seconds, place) for place, (n, seconds) in enumerate(groups)]
    times = enumerate(sorted(syncs), start=1)
    run(gather([*questions, *(sync(version, at) for version, at in times)]))
    asked = [one for client in clients for one in client.asked]
    placed = Counter((one.priority, one.under) for one in asked)
    for place, (n, _) in enumerate(groups):
        assert all(placed[place, version] <= 1 + n for version in range(len(syncs) + 1))
    assert all(
        client.most <= max(capacity, 3)
        for client, capacity in zip(clients, capacities, strict=True)
    )
    assert left_nothing(pool) and pool.capacity == sum(capacities)
