"""A fleet with models of server processes: lost generators are replaced, and an outage of all has a
limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
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


LIMIT_S = 900.0
START_S, SYNC_S, LOOK_S = 30.0, 2.0, 0.2
REQUEST = Request(Prompt(id=0, token_ids=[5], text=""), 1, 0, 0, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualClock]:
    loop = VirtualClock()
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=loop.time))
    yield loop
    loop.close()


class Outage:
    """A run whose `generators` are lost; a looking trainer syncs each replacement, and `does` says
    what that does."""

    def __init__(self, does: Callable[[Outage, Generator], None], generators: int = 1) -> None:
        self.does = does
        self.limit = OutageLimit(LIMIT_S, [])
        self.pool = GeneratorPool([make_generator(number, 8) for number in range(generators)])
        self.replacements = 0
        self.pool.on_evicted = lambda lost: self.later(self.replace(lost))
        self.tasks: list[asyncio.Task[None]] = []

    def later(self, work: object) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))  # type: ignore[arg-type]

    async def replace(self, lost: Generator) -> None:
        pause_s = min(
            job_supervisor.LONGEST_BACKOFF_S, job_supervisor.FIRST_BACKOFF_S * 2**self.replacements
        )
        await asyncio.sleep(pause_s + START_S)
        self.replacements += 1
        self.pool.pending.append(make_generator(0, 8))

    async def begin(self) -> None:
        for generator in self.pool.generators:
            await generator.resume(0)
        await self.pool.prove(list(self.pool.generators), self.passes)
        for generator in list(self.pool.generators):
            self.pool.evict(generator, "its process has ended")

    async def passes(self, generator: Generator) -> None:
        """A proof that finds nothing."""

    async def look(self, seconds: float) -> None:
        """Looks as a waiting trainer does; raises NoGenerators at the limit."""
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            self.limit.check_outage(self.pool)
            if self.pool.pending:
                await self.pool.admit_pending()
                for generator in [one for one in self.pool.generators if one.version < 0]:
                    self.does(self, generator)
            await asyncio.sleep(LOOK_S)

    def run(self, clock: VirtualClock, seconds: float = 24 * 3600.0) -> float:
        """Returns the seconds until the run ended."""

        async def scene() -> float:
            await self.begin()
            begun = clock.time()
            try:
                with pytest.raises(NoGenerators, match=r"strategy\.generator_timeout_s=900"):
                    await self.look(seconds)
            finally:
                for task in self.tasks:
                    task.cancel()
            return clock.time() - begun

        return clock.run_until_complete(scene())


def fails_its_sync(run: Outage, generator: Generator) -> None:
    async def sync() -> None:
        await asyncio.sleep(SYNC_S)
        await run.pool.finish_sync({generator: "/update_weights did not answer"})

    run.later(sync())


def fails_its_proof(run: Outage, generator: Generator) -> None:
    async def compare(one: Generator) -> None:
        await asyncio.sleep(SYNC_S)
        raise GeneratorError("it does not compute what the policy computes")

    async def sync() -> None:
        await generator.resume(1)
        await run.pool.finish_sync({})
        await run.pool.prove([generator], compare)

    run.later(sync())


def ends_at_its_first_request(run: Outage, generator: Generator) -> None:
    async def sync() -> None:
        await generator.resume(1)
        await run.pool.finish_sync({})
        await run.pool.prove([generator], run.passes)
        generator.reserve(REQUEST, [Rollout()])
        await asyncio.sleep(20.0)
        run.pool.evict(generator, "its process has ended")

    run.later(sync())


@pytest.mark.parametrize("generators", [1, 8])
@pytest.mark.parametrize("does", [fails_its_sync, fails_its_proof, ends_at_its_first_request])
def test_a_run_ends_at_its_limit_whatever_the_replacements_do(
    does: Callable[[Outage, Generator], None], generators: int, clock: VirtualClock
) -> None:
    seconds = Outage(does, generators).run(clock)
    assert LIMIT_S < seconds <= LIMIT_S + 25.0  # one that has a request may still answer


@pytest.mark.parametrize("writes", [True, False], ids=["it writes", "nobody needs it"])
@pytest.mark.parametrize("looked", [True, False], ids=["seen by a look", "between two looks"])
def test_an_outage_begins_anew_after_a_replacement_was_of_use(
    writes: bool, looked: bool, clock: VirtualClock
) -> None:
    def is_of_use(run: Outage, generator: Generator) -> None:
        async def sync() -> None:
            await generator.resume(1)
            await run.pool.finish_sync({})
            await run.pool.prove([generator], run.passes)
            if writes:
                generator.client.last_token_at = clock.time()

        run.does = fails_its_proof
        run.later(sync())

    run = Outage(is_of_use)

    async def scene() -> float:
        await run.begin()
        await run.look(LIMIT_S / 2)
        (serving,) = run.pool.serving
        if not looked:
            run.pool.alone_since = clock.time() - LIMIT_S / 2
        run.pool.evict(serving, "its process has ended")
        begun = clock.time()
        with pytest.raises(NoGenerators):
            await run.look(2 * LIMIT_S)
        for task in run.tasks:
            task.cancel()
        return clock.time() - begun

    assert LIMIT_S < clock.run_until_complete(scene()) <= LIMIT_S + 1.0
