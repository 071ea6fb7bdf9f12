"""The worker processes of the reward pool: takes jobs, returns outcomes, and finds the response
that killed a worker.

Workers are spawned, not forked. The trainer has threads. A fork would also inherit its open pipes
and sockets, and other processes notice the death of the trainer by their closing. So a worker
imports the script that was run.
"""

import asyncio
import itertools
import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

from pebble import ProcessExpired, ProcessPool

from lrl.errors import ConfigError
from lrl.rewards import worker
from lrl.rewards.job import Job, WorkerSpec
from lrl.rewards.job_state import JobState, Outcome
from lrl.system.foreign_code import GUARD, OUT_OF_MEMORY, cause_of_death
from lrl.system.process_clock import ProcessClock

log = logging.getLogger(__name__)

_ATTEMPTS = 5
"""Times that a job is begun if all workers are lost, mostly through the fault of other jobs."""
_POLL_S = 1.0
"""Seconds between two looks at whether the worker of a job lives."""
_JOB_STATES = 256
"""Far more than jobs that run at once. If a later job has overwritten the state, no single response
can be blamed."""


class Processes:
    """Worker processes that can be killed one by one. Use: `start()`, `await outcomes(...)`,
    `close()`.

    Args:
        spec: Their rewards and limits.
        workers: Processes on this machine.
        name: Whose they are.
    """

    def __init__(self, spec: WorkerSpec, workers: int, name: str = "rank 0") -> None:
        self.spec = spec
        self.workers = workers
        self.name = name
        self.replaced = 0
        """Workers that were killed or died, and were replaced."""
        self._context = multiprocessing.get_context("spawn")
        self._job_states = self._context.RawArray(JobState, _JOB_STATES)
        self._numbers = itertools.count(1)
        self._pool: ProcessPool | None = None
        # close() comes from another thread, maybe while a lost pool is being replaced.
        self._lock = threading.RLock()
        self._in_flight: dict[int, Future[Any]] = {}
        self._dead: set[int] = set()

    @property
    def in_flight(self) -> int:
        """Jobs without outcomes."""
        return len(self._in_flight)

    def start(self) -> None:
        """Starts the workers and waits until one is ready. See `RewardPool.start`."""
        until = time.monotonic() + self.spec.start_timeout_s
        try:
            pool = self._pool = self._pool or self._new_pool()
            future = _schedule(pool, worker.ready)
            while not future.done() and pool.active and (left_s := until - time.monotonic()) > 0:
                wait([future], timeout=min(_POLL_S, left_s))
            if not (future.done() or pool.active):
                raise BrokenProcessPool("they ended before the first job")
            future.result(0)
        except ValueError as error:
            self.close()
            raise ConfigError(
                f"rewards: {error}. A worker imports the modules of the rewards anew, without what "
                "this process has set up: see that they can be imported by themselves."
            ) from None
        # A pipe to a process of multiprocessing's own breaks if that one has ended already.
        except (BrokenProcessPool, BrokenPipeError) as error:
            self.close()
            raise ConfigError(
                "The reward workers died while they started; their own message is above. They "
                f"import the script that was run. {GUARD}"
            ) from error
        except TimeoutError as error:
            self.close()
            raise TimeoutError(
                "No reward worker was ready after data.worker_start_timeout_s="
                f"{self.spec.start_timeout_s:g}. They import the script that was run and the "
                f"modules of the rewards ({', '.join(self.spec.names)}): see which is slow, or "
                "raise it."
            ) from error

    def close(self) -> None:
        """Kills the workers, whatever they are doing. May be called twice."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is None:
                return
            pool.stop()
            pool.join()
        for future in list(self._in_flight.values()):
            # Done already; pebble leaves the others waiting for ever.
            with suppress(InvalidStateError):
                future.set_exception(BrokenProcessPool("the reward pool was closed"))

    async def outcomes(self, job: Job) -> list[Outcome]:
        """Returns the outcomes of a job, from one worker; None for responses that it did not reach.

        A job of several responses begins none after `timeout_s`. The worker of a response that
        takes longer than that, on a `ProcessClock`, is killed. Raises RuntimeError if the workers
        are not started, or are closed meanwhile.
        """
        count, timeout_s = job.count, self.spec.timeout_s
        arguments = pickle.dumps((count, job.packed)), timeout_s
        for _ in range(_ATTEMPTS):
            number, pool = next(self._numbers), self._live_pool()
            try:
                future = _schedule(pool, worker.score, (number, *arguments))
                self._in_flight[number] = future
                return await self._result(number, future, pool)
            except TimeoutError:
                self.replaced += 1
                return self._blame(number, count, "timeout", f"no reward after {timeout_s:g} s")
            except ProcessExpired as error:
                self.replaced += 1
                return self._blame(number, count, *self._cause_of_death(number, error.exitcode))
            except BrokenProcessPool as error:
                if number in self._dead_jobs(pool, error):
                    return self._blame(number, count, *self._cause_of_death(number, None))
            finally:
                self._in_flight.pop(number, None)
        return self._blame(
            number, count, "crash", f"all reward workers were lost {_ATTEMPTS} times in a row"
        )

    async def trial(self, job: Job) -> Outcome:
        """Returns the outcome of a one-response job; if it fails, the outcome of a second
        attempt."""
        (outcome,) = await self.outcomes(job)
        if isinstance(outcome, str):
            (outcome,) = await self.outcomes(job)
        return outcome

    async def _result(self, number: int, future: Future[Any], pool: ProcessPool) -> Any:
        lost_s = self.spec.limit_s(self.in_flight)
        until = time.monotonic() + lost_s
        deadline = _Deadline(self._state(number), number, self.spec.timeout_s)
        waiting = asyncio.wrap_future(future)
        try:
            while not future.done() and pool.active and time.monotonic() < until:
                dead = self._state(number).is_dead(number)
                await asyncio.wait({waiting}, timeout=min(_POLL_S, self.spec.timeout_s / 4))
                if dead and not future.done():  # pebble misses exit code 0, and a death too early
                    raise ProcessExpired("unnoticed", code=None)
                is_over = deadline.is_over()
                if is_over and not future.done() and not self._state(number).is_dead(number):
                    future.cancel()  # pebble kills its worker
                    raise TimeoutError
                if any(self._state(other).job == other for other in self._in_flight):
                    # While a worker scores any job, a job that waits for its turn is not lost.
                    until = time.monotonic() + lost_s
            if not future.done():
                raise BrokenProcessPool(
                    f"no outcome from them in {lost_s:.0f} s" if pool.active else "they ended"
                )
            return future.result()
        finally:
            waiting.cancel()

    def _state(self, number: int) -> JobState:
        return self._job_states[number % _JOB_STATES]

    def _dead_jobs(self, pool: ProcessPool, error: BrokenProcessPool) -> set[int]:
        """Replaces a lost pool; returns the jobs whose workers had died. The first call still sees
        who was alive."""
        with self._lock:
            if self._pool is pool:
                log.warning("The reward workers are lost (%r).", error.__cause__ or error)
                self._dead = {
                    number for number in self._in_flight if self._state(number).is_dead(number)
                }
                self._renew()
            return self._dead

    def _blame(self, number: int, count: int, kind: str, message: str) -> list[Outcome]:
        """Returns the outcomes of a job whose worker is gone: failures of the current response and
        those before it."""
        failed, reward = self._state(number).at_fault(number, count)
        reason = (
            f"{kind}: {message}"
            if reward is None
            else f"{kind}: {self.spec.names[reward]}: {message}"
        )
        return [reason if index in failed else None for index in range(count)]

    def _cause_of_death(self, number: int, exit_code: int | None) -> tuple[str, str]:
        """Returns kind and message for a worker that ended by itself; pebble does not always know
        the exit code."""
        state, gib = self._state(number), self.spec.memory_gib
        if exit_code == OUT_OF_MEMORY or (state.job == number and state.out_of_memory):
            limit = "" if gib is None else f"; data.reward_memory_gib is {gib:g}"
            return "memory", "MemoryError" + limit
        return "crash", cause_of_death(exit_code)

    def _live_pool(self) -> ProcessPool:
        with self._lock:
            if self._pool is None:
                raise RuntimeError(
                    "The reward pool is not running; call RewardPool.start() before score()."
                )
            return self._pool if self._pool.active else self._renew()

    def _renew(self) -> ProcessPool:
        self.close()
        self.replaced += self.workers
        self._pool = self._new_pool()
        return self._pool

    def _new_pool(self) -> ProcessPool:
        arguments = (self.spec.rewards, os.getpid(), self.spec.memory_gib, self._job_states)
        return ProcessPool(
            self.workers, initializer=worker.initialise, initargs=arguments, context=self._context
        )


class _Deadline:
    """Watches whether a response of a job takes longer than it may.

    Args:
        state: Progress of the job.
        number: The job's number.
        timeout_s: Seconds for one response.
    """

    def __init__(self, state: JobState, number: int, timeout_s: float) -> None:
        self.state = state
        self.number = number
        self.timeout_s = timeout_s
        self._stretch = 0
        self._clock: ProcessClock | None = None

    def is_over(self) -> bool:
        """Returns whether the response that is being scored is late.

        The clock begins at the first call for a response: call it a few times within `timeout_s`.
        """
        if self.state.job != self.number:
            return False
        if self._clock is None or self._stretch != self.state.stretch:
            self._stretch = self.state.stretch
            self._clock = ProcessClock(self.state.worker)
        # The worker itself ends what it awaits; it is late if it cannot.
        limit_s = self.timeout_s if self.state.is_certain else 2 * self.timeout_s
        return self._clock.seconds > limit_s


def _schedule(pool: ProcessPool, job: Callable[..., Any], args: Sequence[Any] = ()) -> Future:
    # pebble refuses a job with a bare RuntimeError if its workers are dead, and loses a job that it
    # takes while they die. Therefore the waiting loops look at `pool.active`, too.
    try:
        return pool.schedule(job, args)  # no deadline of pebble's: it is by the wall
    except RuntimeError as error:
        raise BrokenProcessPool("they had ended") from error
