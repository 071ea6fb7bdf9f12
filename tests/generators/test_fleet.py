"""A fleet with models of server processes: lost generators are replaced, an outage of all has a
limit, and jobs that shall always run do."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace

import pytest

from lrl.errors import GeneratorError, NoGenerators
from lrl.generators import fleet as fleet_module
from lrl.generators import pool as pool_module
from lrl.generators.fleet import Condition, Fleet, JobState, JobSupervisor, Slot
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.planning.clock import VirtualClock
from lrl.types import Rollout
from tests.event_loop import LOOP
from tests.generators.model_fleet import ModelServer, let_requests_succeed, make_generator, request
from tests.leftovers import wait_for


def test_a_run_without_a_generator_logs_it_and_ends_at_the_outage_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    let_requests_succeed(monkeypatch)
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(fleet_module, "JOB_POLL_S", 0.005)
    servers = [ModelServer(0), ModelServer(1)]
    fleet = Fleet(servers, LOOP, capacity=4, heartbeat_s=0.02, outage_timeout_s=0.05)  # type: ignore[arg-type]
    fleet.start()
    for server in servers:
        server.failing = 10**6
        server.alive = False
    wait_for(lambda: not fleet.rollouts.generators)
    fleet.rollouts.check_outage()
    # It never served: its first sync is still to come.
    assert "No generator serves" not in caplog.text
    fleet.rollouts.has_served = True
    fleet.rollouts.check_outage()
    assert "No generator serves; waiting" in caplog.text
    time.sleep(0.06)
    with pytest.raises(NoGenerators, match=r"strategy.generator_timeout_s=0.05.*process has ended"):
        fleet.rollouts.check_outage()
    fleet.stop()
    assert not any(server.alive for server in servers)


LIMIT_S, LOOK_S, START_S = 900.0, 0.2, 30.0
Does = Callable[[GeneratorPool, Generator], Awaitable[None]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualClock]:
    loop = VirtualClock()
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=loop.time))
    yield loop
    loop.close()


async def lost_pool(generators: int = 1) -> GeneratorPool:
    """A pool whose generators have served, and are lost."""
    made = [make_generator(number, 8) for number in range(generators)]
    pool = GeneratorPool(made, outage_timeout_s=LIMIT_S)
    for generator in list(pool.generators):
        await serves(pool, generator)
        pool.evict(generator, "its process has ended")
    return pool


async def look(pool: GeneratorPool, seconds: float) -> None:
    """Looks as a waiting trainer does; raises NoGenerators at the limit."""
    for _ in range(int(seconds / LOOK_S)):
        pool.check_outage()
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
    generator.reserve(request(5, Rollout()))
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


STARTING, SERVING, LEFT = (
    Condition(state) for state in (JobState.STARTING, JobState.SERVING, JobState.LEFT)
)
FAILED = Condition(JobState.FAILED, "it is silent")


class ModelSlot(Slot):
    name = "a job"

    def __init__(self) -> None:
        self.now = STARTING
        self.starts: list[float] = []
        self.threads: list[threading.Thread] = []
        self.ends = 0
        self.error: OSError | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    def start(self) -> None:
        self.threads.append(threading.current_thread())
        self.starts.append(fleet_module.time.monotonic())
        if self.error is not None:
            raise self.error

    def condition(self) -> Condition:
        return self.now

    def end(self) -> None:
        assert self.may_end.wait(60)
        self.threads.append(threading.current_thread())
        self.ends += 1


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def poll(slot: Slot, now: list[float], seconds: int) -> None:
    """Looks once a second."""
    for _ in range(seconds):
        now[0] += 1
        slot.poll()


@pytest.mark.parametrize("error", [None, OSError("no such partition")])
def test_a_job_that_fails_again_and_again_waits_longer_and_longer_and_not_for_ever(
    error: OSError | None, seconds: list[float]
) -> None:
    slot = ModelSlot()
    slot.now, slot.error = FAILED, error
    poll(slot, seconds, 2000)
    pauses = [later - earlier for earlier, later in zip(slot.starts, slot.starts[1:], strict=False)]
    assert slot.why == ("it is silent" if error is None else f"it cannot be started: {error}")
    assert pauses == sorted(pauses) and pauses[3] >= 8
    assert max(pauses) <= fleet_module.LONGEST_BACKOFF_S + 2 and len(pauses) > 10


@pytest.mark.parametrize("served_s", [59, 61])
def test_a_job_that_served_for_long_is_replaced_as_fast_as_at_first(
    seconds: list[float], served_s: int
) -> None:
    slot = ModelSlot()
    slot.now = FAILED
    poll(slot, seconds, 40)
    while not slot.running:
        poll(slot, seconds, 1)
    before = slot.failures
    slot.now = SERVING
    poll(slot, seconds, served_s)
    slot.now = FAILED
    poll(slot, seconds, 1)
    assert slot.failures == (1 if served_s > fleet_module.STABLE_S else before + 1)


def test_a_job_that_left_is_ended_and_not_started_again(seconds: list[float]) -> None:
    slot = ModelSlot()
    slot.running, slot.now = True, LEFT
    poll(slot, seconds, 100)
    assert slot.starts == [] and slot.ends == 1 and slot.failures == 0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fleet_module, "JOB_POLL_S", 0.005)
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_S", 0.0)
    yield


def test_a_job_that_is_slow_to_end_delays_no_other(at_once: None) -> None:
    slow, quick = ModelSlot(), ModelSlot()
    slow.may_end.clear()
    slow.now = quick.now = FAILED
    supervisor = JobSupervisor([slow, quick])
    supervisor.start()
    wait_for(lambda: len(quick.starts) > 2, 60.0, "the other's replacements")
    assert len(slow.starts) == 1
    slow.may_end.set()
    supervisor.stop()


@pytest.mark.parametrize("started", [False, True])
def test_all_jobs_end_with_their_supervisor_by_the_threads_that_have_started_them(
    started: bool, at_once: None
) -> None:
    """The kernel ends some jobs together with that thread."""
    slots = [ModelSlot(), ModelSlot()]
    supervisor = JobSupervisor(slots)
    if started:
        supervisor.start()
        wait_for(lambda: all(slot.starts for slot in slots), 60.0, "the starts")
    supervisor.stop()
    for slot in slots:
        assert slot.ends == len(set(slot.threads)) == 1
        assert (threading.current_thread() in slot.threads) == (not started)
