"""The job of a reward worker, its spec and its outcomes, as they travel to scorers.

Rank 0 unpickles nothing: whoever has the run's token may send it anything, and only what is an
outcome counts.
"""

from __future__ import annotations

import math
import pickle
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from lrl.errors import BadAnswer
from lrl.rewards.base import Reward
from lrl.rewards.failure_stats import KINDS
from lrl.rewards.job_state import Outcome, Scored

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
    start_timeout_s: float

    @classmethod
    def of(cls, rewards: Sequence[Reward], **limits: Any) -> WorkerSpec:
        """Returns the spec of these rewards."""
        names = tuple(reward.name for reward in rewards)
        return cls(pickle.dumps(rewards), names, **limits)

    def limit_s(self, in_flight: int) -> float:
        """Returns the seconds in which workers with so many jobs must have done the last one."""
        return self.start_timeout_s + 4 * self.timeout_s * in_flight


@dataclass(frozen=True)
class Job:
    """Responses to one prompt, which one worker scores."""

    count: int
    packed: bytes
    """The pickled prompt and responses. Only a worker unpickles it: a row may hold objects of a
    user's own classes."""

    @classmethod
    def of(cls, prompt: str, responses: Sequence[Response]) -> Job:
        """Returns the job of these responses."""
        return cls(len(responses), pickle.dumps((prompt, list(responses))))


class Scorer(Protocol):
    """Workers that score jobs: rank 0's own (`Processes`) or another's (`RemoteScorer`)."""

    name: str
    workers: int

    @property
    def in_flight(self) -> int:
        """Jobs without outcomes."""

    async def outcomes(self, job: Job) -> list[Outcome]:
        """Returns the outcome of each response."""


@dataclass(frozen=True)
class ScoringTerms:
    """The rewards and limits of a scorer."""

    spec: WorkerSpec
    trial: Job | None
    """A response of one that rank 0 has scored; a scorer must score it before it gets jobs."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of a JSON object."""
        spec = asdict(self.spec) | {"rewards": b64encode(self.spec.rewards).decode()}
        return {"spec": spec, "trial": self.trial and b64encode(self.trial.packed).decode()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ScoringTerms:
        """Returns the terms in these fields; raises KeyError, TypeError or ValueError for
        others."""
        spec = fields["spec"]
        spec |= {"rewards": b64decode(spec["rewards"]), "names": tuple(spec["names"])}
        return cls(WorkerSpec(**spec), fields["trial"] and Job(1, b64decode(fields["trial"])))


def read_outcomes(values: Any, count: int) -> list[Outcome]:
    """Returns the outcomes in the JSON of a scorer about `count` responses.

    Raises:
        BadAnswer: They are not that many, or one is no outcome.
    """
    if not isinstance(values, list) or len(values) != count:
        raise BadAnswer(f"no list of {count} outcomes")
    return [_outcome(value) for value in values]


def _outcome(value: Any) -> Outcome:
    match value:
        case None:
            return None
        case str() if value.partition(":")[0] in KINDS:
            return value
        case [reward, dict() as parts, str() as gave_up] if all(
            map(_is_number, [reward, *parts.values()])
        ):
            return Scored(
                float(reward), {name: float(part) for name, part in parts.items()}, gave_up
            )
    raise BadAnswer(f"{str(value)[:80]!r} is no outcome of a response")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
