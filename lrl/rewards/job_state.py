"""What a job leaves behind when its worker is killed or crashes: memory that worker and trainer share.

Only so is it known which answer was to blame, and which had failed already. The others are not at fault, and are tried
as if for the first time.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple


class Scored(NamedTuple):
    """An answer with a reward."""

    reward: float
    """The weighted sum."""
    parts: dict[str, float]
    """By the rewards' names, before the weights."""
    gave_up: str = ""
    """Which reward gave up on it, and why; empty if none did."""


Outcome = Scored | str | None
"""Of one answer: its reward; or a failure as in `Rollout.reward_failure`; or None, not tried."""

_MARKED = 1024
"""Answers of a job that can be marked as failed. A later one may be tried three times."""
_UNCERTAIN = -1


class JobState(ctypes.Structure):
    """Where one job is. Its worker alone writes it; the trainer reads it once the worker is gone."""

    _fields_ = [
        ("job", ctypes.c_int64),
        ("worker", ctypes.c_int32),
        ("full", ctypes.c_int32),
        ("answer", ctypes.c_int32),
        ("reward", ctypes.c_int32),
        ("failed", ctypes.c_uint8 * _MARKED),
    ]

    def begin(self, job: int) -> None:
        """Job number `job` begins, and nothing has failed yet."""
        self.job, self.worker, self.full = 0, os.getpid(), 0
        self.uncertain()
        ctypes.memset(self.failed, 0, _MARKED)
        self.job = job

    def end(self) -> None:
        """The job has its outcomes; its worker's next death is another one's."""
        self.job = 0

    def at(self, answer: int, reward: int) -> None:
        """From here on this reward works on this answer, and nothing else runs."""
        self.answer, self.reward = answer, reward

    def uncertain(self) -> None:
        """From here on it is not known who works on what."""
        self.answer = _UNCERTAIN

    def out_of_memory(self, answer: int, reward: int) -> None:
        """This reward asked for more memory than there is; the worker ends."""
        self.at(answer, reward)
        self.full = 1

    def ended(self, answer: int, outcome: Outcome) -> None:
        """An answer has its outcome."""
        self.uncertain()
        if isinstance(outcome, str) and answer < _MARKED:
            self.failed[answer] = 1

    def is_dead(self, job: int) -> bool:
        """Whether the worker that had begun this job is no more."""
        if self.job != job:
            return False
        try:
            os.kill(self.worker, 0)
        except ProcessLookupError:
            return True
        return False

    def left(self, job: int, answers: int) -> tuple[set[int], int | None]:
        """What is known of a job without an outcome.

        Args:
            job: Its number.
            answers: How many it had.

        Returns:
            Its answers that failed, the one that ended it among them; and the reward that ended it, None if uncertain.
        """
        alone = {0} if answers == 1 else set()
        if self.job != job:
            return alone, None
        failed = alone | {answer for answer in range(min(answers, _MARKED)) if self.failed[answer]}
        return (failed, None) if self.answer == _UNCERTAIN else (failed | {self.answer}, self.reward)
