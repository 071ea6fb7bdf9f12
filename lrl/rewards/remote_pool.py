"""The scorers of a run, as rank 0 sees them: servers with reward workers of their own.

A scorer that is lost takes nothing with it: its jobs fail with `ScorerLostError`, and the reward
pool gives them to others. So each job has one list of outcomes, whoever scored it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from lrl.errors import ScorerLostError
from lrl.rewards.job import BadOutcomesError, Job, Scorer, ScoringTerms, WorkerSpec, read_outcomes
from lrl.rewards.job_state import Outcome
from lrl.system.auth import bearer
from lrl.system.endpoint import Location

SCORE = "/score"
COUNT = "Lrl-Responses"
"""The header with the number of responses in a job."""
CHECK_S = 10.0
"""Seconds for a connection to a scorer."""


class RemoteScorer:
    """A scorer.

    Args:
        number: Its number among those of the run.
        node: The name of its machine.
        workers: Processes that score there.
        location: Its server.
        token: The run's.
        pool: Where it belongs.

    Raises:
        ValueError: Its certificate cannot be read.
    """

    def __init__(
        self,
        number: int,
        node: str,
        workers: int,
        location: Location,
        token: str,
        pool: RemotePool,
    ) -> None:
        self.number = number
        self.name = f"scorer {number} on {node}"
        self.workers = max(1, workers)
        self.lost = ""
        """Why it gets no more jobs; empty if it does."""
        self._pool = pool
        self._url = location.url + SCORE
        self._trust = location.context()
        self._token = token
        self._jobs: dict[asyncio.Task[list[Outcome]], asyncio.AbstractEventLoop] = {}

    @property
    def in_flight(self) -> int:
        """Jobs without outcomes."""
        return len(self._jobs)

    async def check(self) -> None:
        """Raises OSError if it does not answer, or is no scorer of this run."""
        await self._request("GET", CHECK_S)

    async def outcomes(self, job: Job) -> list[Outcome]:
        """Returns the outcome of each response; see `Processes.outcomes`.

        Raises:
            ScorerLostError: The scorer is lost before it has answered.
        """
        self._raise_if_lost()
        # Its workers have the deadlines of rank 0's. This one is for a scorer that does not answer,
        # and yet is alive.
        deadline_s = 2 * self._pool.spec.limit_s(self.in_flight + 1)
        request = asyncio.create_task(self._score(job, deadline_s))
        self._jobs[request] = asyncio.get_running_loop()
        try:
            return await request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # then `lose` has cancelled the request
                self._raise_if_lost()
            raise
        except (OSError, BadOutcomesError) as error:
            self.lose(str(error))
            raise ScorerLostError(self.lost) from error
        finally:
            del self._jobs[request]

    def lose(self, why: str) -> None:
        """Fails all of its jobs, and every later one. May be called on any thread."""
        self.lost = self.lost or why
        for request, loop in list(self._jobs.items()):
            loop.call_soon_threadsafe(request.cancel)

    def _raise_if_lost(self) -> None:
        if self.lost:
            raise ScorerLostError(self.lost)

    async def _score(self, job: Job, deadline_s: float) -> list[Outcome]:
        found = await self._request("POST", deadline_s, job)
        match found:
            case {"outcomes": values, "replaced": int(replaced)}:
                self._pool.replaced_by[self.number] = replaced
                return [self._named(each) for each in read_outcomes(values, job.count)]
        raise BadOutcomesError(f"{str(found)[:80]!r} are no outcomes")

    async def _request(self, method: str, deadline_s: float, job: Job | None = None) -> Any:
        """Returns the JSON of a response; raises OSError for none, or another status than 200."""
        import aiohttp  # not at the top: every reward worker imports this file, and none needs it

        headers = {"Authorization": bearer(self._token)}
        if job is not None:
            headers[COUNT] = str(job.count)
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CHECK_S)
        connector = aiohttp.TCPConnector(ssl=self._trust or True)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=connector, headers=headers, timeout=timeout
                ) as session,
                session.request(
                    method, self._url, data=None if job is None else job.packed
                ) as response,
            ):
                if response.status != 200:
                    raise OSError(
                        f"it responded {response.status}: {(await response.text())[:200]}"
                    )
                return await response.json()
        except TimeoutError as error:
            raise OSError(f"no answer from it in {deadline_s:.0f} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise OSError(repr(error)) from error

    def _named(self, outcome: Outcome) -> Outcome:
        return f"{outcome} ({self.name})" if isinstance(outcome, str) else outcome


class RemotePool:
    """The scorers of a run. Each method may be called on any thread.

    Args:
        spec: What each scorer's workers must know.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.trial: Job | None = None
        """A response that a scorer must score before it gets jobs."""
        self.replaced_by: Counter[int] = Counter()
        """Workers that were killed or died, by the number of their scorer, also of lost ones."""
        self._scorers: dict[int, RemoteScorer] = {}
        self._lock = threading.Lock()

    @property
    def scorers(self) -> list[RemoteScorer]:
        """The scorers that were added and not removed."""
        with self._lock:
            return list(self._scorers.values())

    @property
    def ready(self) -> list[RemoteScorer]:
        """The scorers that get jobs."""
        return [scorer for scorer in self.scorers if not scorer.lost]

    def terms(self) -> dict[str, Any]:
        """Returns the rewards and limits of a scorer, as JSON."""
        return ScoringTerms(self.spec, self.trial).to_json()

    def add(self, scorer: RemoteScorer) -> None:
        """Adds a scorer, which gets jobs from now on."""
        with self._lock:
            self._scorers[scorer.number] = scorer

    def remove(self, number: int, why: str) -> bool:
        """Removes a scorer, whose jobs go to others; returns whether it was there."""
        with self._lock:
            scorer = self._scorers.pop(number, None)
        if scorer is not None:
            scorer.lose(why)
        return scorer is not None

    def close(self) -> None:
        """Removes all scorers."""
        for scorer in self.scorers:
            self.remove(scorer.number, "the run has ended")


def least_busy(scorers: Iterable[Scorer]) -> Scorer:
    """Returns the first of the scorers with the fewest jobs for each worker, counting one more."""
    return min(scorers, key=lambda one: (one.in_flight + 1) / one.workers)
