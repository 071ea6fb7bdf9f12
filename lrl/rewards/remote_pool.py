"""The scorers of a run, as rank 0 sees them: servers with reward workers of their own.

The jobs of a lost scorer fail with `ScorerLostError`, and the reward pool gives them to others. So
each job has one list of outcomes, whoever scored it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lrl.errors import BadAnswer, ScorerLostError
from lrl.rewards.job import Job, Scorer, ScoringTerms, WorkerSpec, read_outcomes
from lrl.rewards.job_state import Outcome
from lrl.system.remote_workers import CHECK_S, MemberAddress, RemotePool, RemoteWorkers

SCORE = "/score"
COUNT = "Lrl-Responses"
"""The header with the number of responses in a job."""


class RemoteScorer(RemoteWorkers):
    """A scorer; see `RemoteWorkers`.

    Args:
        address: Where it is.
        pool: Where it belongs.
    """

    kind = "scorer"
    lost_error = ScorerLostError

    def __init__(self, address: MemberAddress, pool: RemoteScorers) -> None:
        super().__init__(address)
        self._pool = pool

    async def check(self) -> None:
        await self.request("GET", SCORE, CHECK_S)

    async def outcomes(self, job: Job) -> list[Outcome]:
        """Returns the outcome of each response; see `Processes.outcomes`.

        Raises:
            ScorerLostError: The scorer is lost before it has answered.
        """
        # Its workers have the deadlines of rank 0's. This one is for a scorer that does not answer,
        # and yet is alive.
        deadline_s = 2 * self._pool.spec.limit_s(self.in_flight + 1)
        return await self.answered(self._score(job, deadline_s))

    async def _score(self, job: Job, deadline_s: float) -> list[Outcome]:
        headers = {COUNT: str(job.count)}
        found = await self.request("POST", SCORE, deadline_s, data=job.packed, headers=headers)
        match found:
            case {"outcomes": values, "replaced": int(replaced)}:
                self._pool.replaced_by[self.number] = replaced
                return [self._named(each) for each in read_outcomes(values, job.count)]
        raise BadAnswer(f"{str(found)[:80]!r} are no outcomes")

    def _named(self, outcome: Outcome) -> Outcome:
        return f"{outcome} ({self.name})" if isinstance(outcome, str) else outcome


class RemoteScorers(RemotePool[RemoteScorer]):
    """The scorers of a run. Each method may be called on any thread.

    Args:
        spec: What each scorer's workers must know.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.trial: Job | None = None
        """A response that a scorer must score before it gets jobs."""

    def terms(self) -> dict[str, Any]:
        """Returns the rewards and limits of a scorer, as JSON."""
        return ScoringTerms(self.spec, self.trial).to_json()

    def reach(self, address: MemberAddress) -> RemoteScorer:
        return RemoteScorer(address, self)


def least_busy(scorers: Iterable[Scorer]) -> Scorer:
    """Returns the first of the scorers with the fewest jobs for each worker, counting one more."""
    return min(scorers, key=lambda one: (one.in_flight + 1) / one.workers)
