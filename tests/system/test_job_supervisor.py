"""Jobs that shall always run: models of jobs, which fail as they are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lrl.system import job_supervisor
from lrl.system.job_supervisor import Condition, JobState, JobSupervisor, Slot
from tests.leftovers import wait_for

STARTING, SERVING, LEFT = (
    Condition(state) for state in (JobState.STARTING, JobState.SERVING, JobState.LEFT)
)
FAILED = Condition(JobState.FAILED, "it is silent")


class ModelSlot(Slot):
    name = "a job"

    def __init__(self) -> None:
        self.now = STARTING
        self.starts: list[float] = []
        self.ends = 0
        self.error: OSError | None = None
        self.may_end = threading.Event()
        self.may_end.set()

    def start(self) -> None:
        if self.error is not None:
            raise self.error
        self.starts.append(job_supervisor.time.monotonic())

    def condition(self) -> Condition:
        return self.now

    def end(self) -> None:
        assert self.may_end.wait(60)
        self.ends += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(job_supervisor.time, "monotonic", lambda: now[0])
    return now


def poll(supervisor: JobSupervisor, clock: list[float], seconds: int) -> None:
    """Looks at every slot once a second."""
    for _ in range(seconds):
        clock[0] += 1
        for slot in supervisor.slots:
            slot.poll()


def test_a_job_that_fails_again_and_again_waits_longer_and_longer_and_not_for_ever(
    clock: list[float],
) -> None:
    slot = ModelSlot()
    slot.now = FAILED
    poll(JobSupervisor([slot]), clock, 2000)
    pauses = [later - earlier for earlier, later in zip(slot.starts, slot.starts[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[3] >= 8
    assert max(pauses) <= job_supervisor.LONGEST_BACKOFF_S + 2 and len(pauses) > 10


def test_a_job_that_cannot_be_started_waits_as_one_that_fails(clock: list[float]) -> None:
    slot = ModelSlot()
    slot.error = OSError("no such partition")
    poll(JobSupervisor([slot]), clock, 20)
    assert slot.failures == 5 and "cannot be started: no such partition" in slot.why


@pytest.mark.parametrize("served_s", [59, 61])
def test_a_job_that_served_for_long_is_replaced_as_fast_as_at_first(
    clock: list[float], served_s: int
) -> None:
    slot = ModelSlot()
    supervisor = JobSupervisor([slot])
    slot.now = FAILED
    poll(supervisor, clock, 40)
    while not slot.running:
        poll(supervisor, clock, 1)
    before = slot.failures
    slot.now = SERVING
    poll(supervisor, clock, served_s)
    slot.now = FAILED
    poll(supervisor, clock, 1)
    assert slot.failures == (1 if served_s > job_supervisor.STABLE_S else before + 1)


def test_a_job_that_left_is_ended_and_not_started_again(clock: list[float]) -> None:
    slot = ModelSlot()
    slot.running, slot.now = True, LEFT
    poll(JobSupervisor([slot]), clock, 100)
    assert slot.starts == [] and slot.ends == 1 and slot.failures == 0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(job_supervisor, "POLL_S", 0.005)
    monkeypatch.setattr(job_supervisor, "FIRST_BACKOFF_S", 0.0)
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


def test_all_jobs_end_with_their_supervisor_started_or_not(at_once: None) -> None:
    for started in (False, True):
        slots = [ModelSlot(), ModelSlot()]
        supervisor = JobSupervisor(slots)
        if started:
            supervisor.start()
        supervisor.stop()
        assert [slot.ends for slot in slots] == [1, 1]


def test_a_job_is_ended_by_the_thread_that_has_started_it(at_once: None) -> None:
    """The kernel ends some jobs together with that thread."""
    threads: list[str] = []

    class Threads(ModelSlot):
        def start(self) -> None:
            threads.append(threading.current_thread().name)

        def end(self) -> None:
            threads.append(threading.current_thread().name)

    supervisor = JobSupervisor([Threads()])
    supervisor.start()
    wait_for(lambda: threads, 60.0, "the start")
    supervisor.stop()
    assert threads[0] == threads[1] != threading.current_thread().name
