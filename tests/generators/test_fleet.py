"""The limit of an outage, and jobs that shall always run; tests/members/test_admission.py has a
fleet."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from lrl.errors import GeneratorError, NoGenerators
from lrl.generators import fleet as fleet_module
from lrl.generators import pool as pool_module
from lrl.generators.fleet import Condition, JobState, JobSupervisor, SupervisedJob
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool, Prove
from lrl.types import Rollout
from tests.generators.model_fleet import make_generator, on_a_virtual_clock, request
from tests.leftovers import wait_for

LIMIT_S, LOOK_S, START_S = 900.0, 0.2, 30.0
ENDED = "its process has ended"
PASSES = AsyncMock()
Does = Callable[[GeneratorPool, Generator], Awaitable[None]]


@pytest.fixture(autouse=True)
def clock_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    monkeypatch.setattr(pool_module, "time", now)


async def lost_pool(generators: int = 1) -> GeneratorPool:
    """A pool whose generators have served, and are lost."""
    made = [make_generator(number, 8) for number in range(generators)]
    pool = GeneratorPool(made, outage_timeout_s=LIMIT_S)
    for generator in made:
        await serves(pool, generator)
        pool.evict(generator, ENDED)
    return pool


async def look(pool: GeneratorPool, seconds: float) -> None:
    """Looks as a waiting trainer does; raises NoGenerators at the limit."""
    for _ in range(int(seconds / LOOK_S)):
        pool.check_outage()
        await asyncio.sleep(LOOK_S)


async def seconds_until_the_end(pool: GeneratorPool) -> float:
    begun = asyncio.get_running_loop().time()
    with pytest.raises(NoGenerators, match=r"strategy\.generator_timeout_s=900.*because: \S"):
        await look(pool, 24 * 3600.0)
    return asyncio.get_running_loop().time() - begun


async def joins(pool: GeneratorPool) -> Generator:
    pool.pending.append(generator := make_generator(0, 8))
    await pool.admit_pending()
    return generator


async def serves(pool: GeneratorPool, generator: Generator, prove: Prove = PASSES) -> None:
    await generator.resume(1)
    await pool.finish_sync({})
    await pool.prove([generator], prove)


async def fails_its_sync(pool: GeneratorPool, generator: Generator) -> None:
    await asyncio.sleep(2.0)
    await pool.finish_sync({generator: "/update_weights did not answer"})


async def fails_its_proof(pool: GeneratorPool, generator: Generator) -> None:
    differs = GeneratorError("it does not compute what the policy computes")
    await serves(pool, generator, AsyncMock(side_effect=differs))


async def ends_at_its_first_request(pool: GeneratorPool, generator: Generator) -> None:
    await serves(pool, generator)
    generator.reserve(request(5, Rollout()))
    await asyncio.sleep(20.0)
    pool.evict(generator, ENDED)


@pytest.mark.parametrize("generators", [1, 8])
@pytest.mark.parametrize("does", [fails_its_sync, fails_its_proof, ends_at_its_first_request])
@on_a_virtual_clock
async def test_a_run_ends_at_its_limit_whatever_the_replacements_do(
    does: Does, generators: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await lost_pool(generators)

    async def replace() -> None:
        for failures in itertools.count():
            await asyncio.sleep(START_S + min(300.0, 2.0**failures))
            await does(pool, await joins(pool))

    replacing = {asyncio.create_task(replace()) for _ in range(generators)}
    # One that has a request may still answer.
    assert LIMIT_S < await seconds_until_the_end(pool) <= LIMIT_S + 25.0
    assert "No generator serves; waiting" in caplog.text and replacing


@pytest.mark.parametrize("writes", [True, False], ids=["it writes", "nobody needs it"])
@pytest.mark.parametrize("looked", [True, False], ids=["seen by a look", "between two looks"])
@on_a_virtual_clock
async def test_an_outage_begins_anew_after_a_replacement_was_of_use(
    writes: bool, looked: bool
) -> None:
    pool = await lost_pool()
    await look(pool, LIMIT_S / 2)
    generator = await joins(pool)
    await serves(pool, generator)
    if writes:
        generator.client.last_token_at = asyncio.get_running_loop().time()
    await asyncio.sleep(5.0)
    if looked:
        await look(pool, 1.0)
    pool.evict(generator, ENDED)
    assert LIMIT_S < await seconds_until_the_end(pool) <= LIMIT_S + 1.0


@on_a_virtual_clock
async def test_a_run_whose_first_sync_is_still_to_come_is_in_no_outage() -> None:
    await look(GeneratorPool([], outage_timeout_s=LIMIT_S), 2 * LIMIT_S)


STARTING, SERVING, LEFT = (
    Condition(state) for state in (JobState.STARTING, JobState.SERVING, JobState.LEFT)
)
FAILED = Condition(JobState.FAILED, "it is silent")


class ModelJob(SupervisedJob):
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


def poll(job: SupervisedJob, now: list[float], seconds: int) -> None:
    """Looks once a second."""
    for _ in range(seconds):
        now[0] += 1
        job.poll()


@pytest.mark.parametrize("error", [None, OSError("no such partition")])
def test_a_job_that_fails_again_and_again_waits_longer_and_longer_and_not_for_ever(
    error: OSError | None, seconds: list[float]
) -> None:
    job = ModelJob()
    job.now, job.error = FAILED, error
    poll(job, seconds, 2000)
    pauses = [later - earlier for earlier, later in zip(job.starts, job.starts[1:], strict=False)]
    assert job.why == ("it is silent" if error is None else f"it cannot be started: {error}")
    assert pauses == sorted(pauses) and pauses[3] >= 8
    assert max(pauses) <= fleet_module.LONGEST_BACKOFF_S + 2 and len(pauses) > 10


@pytest.mark.parametrize("served_s", [59, 61])
def test_a_job_that_served_for_long_is_replaced_as_fast_as_at_first(
    seconds: list[float], served_s: int
) -> None:
    job = ModelJob()
    job.now = FAILED
    poll(job, seconds, 40)
    while not job.running:
        poll(job, seconds, 1)
    before = job.failures
    job.now = SERVING
    poll(job, seconds, served_s)
    job.now = FAILED
    poll(job, seconds, 1)
    assert job.failures == (1 if served_s > fleet_module.STABLE_S else before + 1)


def test_a_job_that_left_is_ended_and_not_started_again(seconds: list[float]) -> None:
    job = ModelJob()
    job.running, job.now = True, LEFT
    poll(job, seconds, 100)
    assert job.starts == [] and job.ends == 1 and job.failures == 0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "JOB_POLL_S", 0.005)
    monkeypatch.setattr(fleet_module, "FIRST_BACKOFF_S", 0.0)


def test_a_job_that_is_slow_to_end_delays_no_other(at_once: None) -> None:
    slow, quick = ModelJob(), ModelJob()
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
    jobs = [ModelJob(), ModelJob()]
    supervisor = JobSupervisor(jobs)
    if started:
        supervisor.start()
        wait_for(lambda: all(job.starts for job in jobs), 60.0, "the starts")
    supervisor.stop()
    for job in jobs:
        assert job.ends == len(set(job.threads)) == 1
        assert (threading.current_thread() in job.threads) == (not started)
