"""A fleet with models of server processes: lost generators are replaced, and an outage of all has a
limit."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace

import pytest

from lrl.errors import GeneratorError, NoGenerators, ServerError
from lrl.generators import fleet as fleet_module
from lrl.generators.client import GeneratorClient
from lrl.generators.fleet import Fleet, OutageLimit
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.planning.clock import VirtualClock
from lrl.routing.dispatch import Request
from lrl.system import job_supervisor
from lrl.types import Prompt, Rollout
from tests.generators.model_fleet import ModelServer, make_generator
from tests.leftovers import wait_for
from tests.scripted_run import let_requests_succeed


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fleet, list[ModelServer]]]:
    let_requests_succeed(monkeypatch)
    monkeypatch.setattr(job_supervisor, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(job_supervisor, "POLL_S", 0.005)
    servers = [ModelServer(0), ModelServer(1)]
    made = Fleet(servers, capacity=4, heartbeat_s=0.02, outage_timeout_s=0.05)  # type: ignore[arg-type]
    made.start()
    yield made, servers
    made.stop()
    assert not any(server.alive for server in servers)


def test_the_error_of_a_first_request_is_what_the_servers_log_says() -> None:
    made = Fleet([ModelServer(0)], capacity=4, heartbeat_s=0.02, outage_timeout_s=0.05)  # type: ignore[list-item]
    with pytest.raises(ServerError, match="Generator 0 has started, and its first request failed:"):
        made.start()  # nothing answers at its address
    made.stop()


def test_an_ended_process_is_evicted_and_its_replacement_waits_for_a_sync(
    fleet: tuple[Fleet, list[ModelServer]],
) -> None:
    made, servers = fleet
    survivor, lost = made.rollouts.generators
    servers[1].alive = False
    wait_for(lambda: bool(made.rollouts.pending))
    assert made.rollouts.generators == [survivor] and "its process has ended" in (
        lost.eviction or ""
    )
    (replacement,) = made.rollouts.pending
    assert (
        replacement is not lost
        and replacement.server is lost.server
        and replacement in made.generators
    )
    assert not replacement.serving and replacement.version == -1 and made.restarts == 1
    assert len(servers[1].starts) == 2


def test_a_replacement_that_fails_is_started_again_after_ever_longer_pauses(
    fleet: tuple[Fleet, list[ModelServer]],
) -> None:
    made, servers = fleet
    servers[1].failing = 3
    servers[1].alive = False
    wait_for(lambda: bool(made.rollouts.pending))
    starts = servers[1].starts
    pauses = [after - before for before, after in zip(starts[1:], starts[2:], strict=False)]
    assert len(starts) == 5 and pauses[0] >= 0.02 and pauses[1] >= 0.04 and pauses[2] >= 0.08


def test_a_run_without_a_generator_logs_it_and_ends_at_the_outage_limit(
    fleet: tuple[Fleet, list[ModelServer]], caplog: pytest.LogCaptureFixture
) -> None:
    made, servers = fleet
    for server in servers:
        server.failing = 10**6
        server.alive = False
    wait_for(lambda: not made.rollouts.generators)
    made.outage_limit.check_outage(made.rollouts)
    # It never served: its first sync is still to come.
    assert "No generator serves" not in caplog.text
    made.rollouts.has_served = True
    made.outage_limit.check_outage(made.rollouts)
    assert "No generator serves; waiting" in caplog.text
    time.sleep(0.06)
    with pytest.raises(NoGenerators, match=r"strategy.generator_timeout_s=0.05.*process has ended"):
        made.outage_limit.check_outage(made.rollouts)


def test_a_request_that_reads_when_the_run_ends_evicts_no_generator(
    fleet: tuple[Fleet, list[ModelServer]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, _ = fleet
    disconnected = asyncio.Event()

    async def close(self: GeneratorClient) -> None:
        disconnected.set()
        await asyncio.sleep(0.05)

    async def read() -> None:
        await disconnected.wait()
        made.rollouts.evict(made.rollouts.generators[0], "Server disconnected")

    monkeypatch.setattr(GeneratorClient, "close", close)
    made.loop.submit(read())
    made.stop()
    assert "is evicted" not in caplog.text


LIMIT_S, LOOK_S, START_S = 900.0, 0.2, 30.0
REQUEST = Request(Prompt(id=0, token_ids=[5], text=""), 1, 0, 0, 0.0)
Does = Callable[[GeneratorPool, Generator], Awaitable[None]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualClock]:
    loop = VirtualClock()
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=loop.time))
    yield loop
    loop.close()


async def lost_pool(generators: int = 1) -> GeneratorPool:
    """A pool whose generators have served, and are lost."""
    pool = GeneratorPool([make_generator(number, 8) for number in range(generators)])
    for generator in list(pool.generators):
        await serves(pool, generator)
        pool.evict(generator, "its process has ended")
    return pool


async def look(pool: GeneratorPool, seconds: float) -> None:
    """Looks as a waiting trainer does; raises NoGenerators at the limit."""
    limit = OutageLimit(LIMIT_S, [])
    for _ in range(int(seconds / LOOK_S)):
        limit.check_outage(pool)
        await asyncio.sleep(LOOK_S)


async def joins(pool: GeneratorPool) -> Generator:
    pool.pending.append(generator := make_generator(0, 8))
    await pool.admit_pending()
    return generator


async def passes(generator: Generator) -> None:
    """A proof that finds nothing."""


async def differs(generator: Generator) -> None:
    raise GeneratorError("it does not compute what the policy computes")


async def serves(pool: GeneratorPool, generator: Generator) -> None:
    await generator.resume(1)
    await pool.finish_sync({})
    await pool.prove([generator], passes)


async def fails_its_sync(pool: GeneratorPool, generator: Generator) -> None:
    await asyncio.sleep(2.0)
    await pool.finish_sync({generator: "/update_weights did not answer"})


async def fails_its_proof(pool: GeneratorPool, generator: Generator) -> None:
    await generator.resume(1)
    await pool.finish_sync({})
    await pool.prove([generator], differs)


async def ends_at_its_first_request(pool: GeneratorPool, generator: Generator) -> None:
    await serves(pool, generator)
    generator.reserve(REQUEST, [Rollout()])
    await asyncio.sleep(20.0)
    pool.evict(generator, "its process has ended")


@pytest.mark.parametrize("generators", [1, 8])
@pytest.mark.parametrize("does", [fails_its_sync, fails_its_proof, ends_at_its_first_request])
def test_a_run_ends_at_its_limit_whatever_the_replacements_do(
    does: Does, generators: int, clock: VirtualClock
) -> None:
    async def scene() -> float:
        pool = await lost_pool(generators)
        begun = clock.time()

        async def replace() -> None:
            for failures in itertools.count():
                await asyncio.sleep(START_S + min(300.0, 2.0**failures))
                await does(pool, await joins(pool))

        tasks = [asyncio.create_task(replace()) for _ in range(generators)]
        with pytest.raises(NoGenerators, match=r"strategy\.generator_timeout_s=900"):
            await look(pool, 24 * 3600.0)
        for task in tasks:
            task.cancel()
        return clock.time() - begun

    seconds = clock.run_until_complete(scene())
    assert LIMIT_S < seconds <= LIMIT_S + 25.0  # one that has a request may still answer


@pytest.mark.parametrize("writes", [True, False], ids=["it writes", "nobody needs it"])
@pytest.mark.parametrize("looked", [True, False], ids=["seen by a look", "between two looks"])
def test_an_outage_begins_anew_after_a_replacement_was_of_use(
    writes: bool, looked: bool, clock: VirtualClock
) -> None:
    async def scene() -> float:
        pool = await lost_pool()
        await look(pool, LIMIT_S / 2)
        generator = await joins(pool)
        await serves(pool, generator)
        if writes:
            generator.client.last_token_at = clock.time()
        await asyncio.sleep(5.0)
        if looked:
            await look(pool, 1.0)
        pool.evict(generator, "its process has ended")
        begun = clock.time()
        with pytest.raises(NoGenerators):
            await look(pool, 2 * LIMIT_S)
        return clock.time() - begun

    assert LIMIT_S < clock.run_until_complete(scene()) <= LIMIT_S + 1.0
