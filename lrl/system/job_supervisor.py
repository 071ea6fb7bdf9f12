"""Jobs that must always run: started, watched, and started again when they have failed.

This one class keeps a run's own generators alive, what a launcher starts, and the generators of
another trainer node.
"""

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

log = logging.getLogger(__name__)

POLL_S = 0.2
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
STABLE_S = 60.0
"""A job that served so long before it failed is started again without a longer pause."""


class JobState(Enum):
    """The activity of a job."""

    STARTING = "starting"
    SERVING = "serving"
    FAILED = "failed"
    """It must be ended and started again."""
    LEFT = "left"
    """It has left at a request, so it is not started again."""


class Condition(NamedTuple):
    """The state of a job, and its reason."""

    state: JobState
    why: str = ""


class Slot(ABC):
    """The slot of one job, and the record of its jobs. Its methods are called on one thread, which
    outlives the job."""

    name: str
    """Of the job, for the log."""
    running = False
    failures = 0
    """Since a job last served for long."""
    why = ""
    """The reason of the last failure."""
    failed_at = 0.0
    _next_start = 0.0
    _serving_since = math.inf

    @abstractmethod
    def start(self) -> None:
        """Starts the job; raises OSError if that is not possible now."""

    @abstractmethod
    def condition(self) -> Condition:
        """Returns the state of the job; called between `start` and `end`."""

    @abstractmethod
    def end(self) -> None:
        """Ends the job, also one that hangs, if there is one. Idempotent."""

    def poll(self) -> None:
        """Starts the job if it is time, or looks at it."""
        if self.running:
            state, why = self.condition()
            if state is JobState.SERVING:
                self._serving_since = min(self._serving_since, time.monotonic())
            elif state is not JobState.STARTING:
                self.end()
                self.running = False
                self._next_start = math.inf
                if state is JobState.FAILED:
                    self._failed(why)
        elif time.monotonic() >= self._next_start:
            self._serving_since = math.inf
            try:
                self.start()
                self.running = True
            except OSError as error:
                self._failed(f"it cannot be started: {error}")

    def _failed(self, why: str) -> None:
        """Decides when the next attempt is due."""
        now = time.monotonic()
        if now - self._serving_since > STABLE_S:
            self.failures = 0
        pause_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**self.failures)
        log.warning("%s is replaced in %g s: %s", self.name.capitalize(), pause_s, why)
        self.why = why
        self.failed_at = now
        self._next_start = now + pause_s
        self.failures += 1


class JobSupervisor:
    """Keeps a job running in each slot, from `start` to `stop`.

    Each slot has its own thread: a job that is slow to start or to end delays no other.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begins to start and watch the jobs."""
        for index, slot in enumerate(self.slots):
            name = f"lrl-jobs-{index}"
            thread = threading.Thread(target=self._run, args=(slot,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends all jobs, all at once, and waits for their end. Idempotent."""
        self._over.set()
        for slot in () if self._threads else self.slots:
            slot.end()
        for thread in self._threads:
            thread.join()

    def _run(self, slot: Slot) -> None:
        try:
            while not self._over.wait(POLL_S):
                slot.poll()
        except Exception:
            log.exception("Watching %s failed; it will not be replaced.", slot.name)
            self._over.wait()
        finally:
            slot.end()
