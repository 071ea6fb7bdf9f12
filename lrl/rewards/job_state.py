"""Progress of a job, in memory that its worker shares with the trainer.

If the worker is killed or crashes, this shows which responses are at fault. The others are scored
again.
"""

import ctypes
import os
from typing import NamedTuple


class Scored(NamedTuple):
    """The reward of a response."""

    reward: float
    """Weighted sum."""
    parts: dict[str, float]
    """Values by the names of the rewards, before the weights."""
    gave_up: str = ""
    """The reward that gave up on the response, and why; empty if none did."""


Outcome = Scored | str | None
"""Outcome of one response: its reward; or a failure as in `Rollout.reward_failure`; or None if it
was not tried."""

_MARKED = 1024
"""Responses of a job that can be marked as failed. One with a larger index may be tried three
times."""
_UNCERTAIN = -1


class JobState(ctypes.Structure):
    """Progress of one job. Only its worker writes; the trainer reads once the worker is dead."""

    _fields_ = [
        ("job", ctypes.c_int64),
        ("worker", ctypes.c_int32),
        ("out_of_memory", ctypes.c_int32),
        ("stretch", ctypes.c_int64),
        ("response", ctypes.c_int32),
        ("reward", ctypes.c_int32),
        ("failed", ctypes.c_uint8 * _MARKED),
    ]

    def begin(self, job: int) -> None:
        """Records that job number `job` begins, without failures."""
        self.job = 0
        self.worker = os.getpid()
        self.out_of_memory = 0
        self.stretch = 0
        self.uncertain()
        ctypes.memset(self.failed, 0, _MARKED)
        self.job = job

    def end(self) -> None:
        """Records that the job has its outcomes; if its worker dies later, another job is at
        fault."""
        self.job = 0

    def begin_stretch(self) -> None:
        """Records the start of a deadline: of one response, or of all awaited responses."""
        self.stretch += 1

    def running(self, response: int, reward: int) -> None:
        """Records that this reward judges this response, and nothing else runs."""
        self.response = response
        self.reward = reward

    def uncertain(self) -> None:
        """Records that any reward may run on any response."""
        self.response = _UNCERTAIN

    @property
    def is_certain(self) -> bool:
        """Whether one reward runs on one response, and nothing else."""
        return self.response != _UNCERTAIN

    def scored(self, response: int, outcome: Outcome) -> None:
        """Records the outcome of a response."""
        self.uncertain()
        if isinstance(outcome, str) and response < _MARKED:
            self.failed[response] = 1

    def is_dead(self, job: int) -> bool:
        """Returns whether the worker that began this job is dead."""
        if self.job != job:
            return False
        try:
            os.kill(self.worker, 0)
        except ProcessLookupError:
            return True
        return False

    def at_fault(self, job: int, responses: int) -> tuple[set[int], int | None]:
        """Returns, for a job without an outcome, its failed responses and the reward that ended it
        (None: uncertain).

        `job` is its number, `responses` how many it has.
        """
        alone = {0} if responses == 1 else set()
        if self.job != job:
            return alone, None
        failed = alone | {
            response for response in range(min(responses, _MARKED)) if self.failed[response]
        }
        return (
            (failed, None)
            if self.response == _UNCERTAIN
            else (failed | {self.response}, self.reward)
        )
