"""A job of a reward worker, and what a worker must know to do it; both also travel to workers on other machines."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lrl.rewards.base import Reward
from lrl.rewards.job_state import Outcome

START_S = 120.0
"""Seconds for the start of a worker: interpreter, imports of the script that was run, imports of the rewards."""
Response = tuple[str, dict[str, Any]]
"""Text and columns."""


@dataclass(frozen=True)
class WorkerSpec:
    """The rewards of a worker and its limits; see `RewardPool`."""

    rewards: bytes
    """The pickled list of rewards."""
    names: tuple[str, ...]
    timeout_s: float
    memory_gib: float | None

    @classmethod
    def of(cls, rewards: Sequence[Reward], timeout_s: float, memory_gib: float | None) -> WorkerSpec:
        """Returns that of these rewards."""
        return cls(pickle.dumps(rewards), tuple(reward.name for reward in rewards), timeout_s, memory_gib)

    def patience_s(self, in_flight: int) -> float:
        """Returns the seconds after which workers with so many jobs must have answered the last one."""
        return START_S + 4 * self.timeout_s * in_flight


@dataclass(frozen=True)
class Job:
    """Responses to one prompt, which one worker scores."""

    count: int
    packed: bytes
    """The pickled prompt and responses. Only a worker unpickles it: a row may hold objects of a user's own classes."""

    @classmethod
    def of(cls, prompt: str, responses: Sequence[Response]) -> Job:
        """Returns that of these responses."""
        return cls(len(responses), pickle.dumps((prompt, list(responses))))


class Scorer(Protocol):
    """Workers that score jobs: rank 0's own (`Processes`) or a reward host's (`Host`)."""

    name: str
    workers: int

    @property
    def in_flight(self) -> int:
        """Jobs without outcomes."""

    async def outcomes(self, job: Job) -> list[Outcome]:
        """Returns the outcome of each response."""
