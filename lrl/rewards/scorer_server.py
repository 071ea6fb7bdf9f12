"""The server of a scorer: takes jobs from a run, and scores them with workers of its own.

    POST /score    a job (pickled; a header counts its responses); returns the outcomes
    GET  /score    whether it scores

Behind the run's token, as a generator is: whoever has it can run code here by a job. The workers
are those of rank 0 (`lrl.rewards.processes`), so a response has the same deadlines, memory limit
and kinds of failure wherever it is scored.
"""

import asyncio

from aiohttp import web

from lrl.rewards.job import Job, ScoringTerms
from lrl.rewards.job_state import Scored
from lrl.rewards.processes import Processes
from lrl.rewards.remote_pool import COUNT, SCORE
from lrl.system.endpoint import Endpoint, Location
from lrl.system.token_server import TokenServer


class ScorerServer:
    """The workers and the server of a scorer. Use: `start()`, then it scores, then `stop()`.

    Args:
        terms: Rewards and limits.
        workers: Processes that score.
        endpoint: The address that it listens on, and its TLS.
        token: The run's.
    """

    def __init__(self, terms: ScoringTerms, workers: int, endpoint: Endpoint, token: str) -> None:
        self.endpoint = endpoint
        self.token = token
        self.trial = terms.trial
        self.processes = Processes(terms.spec, workers, "this scorer")
        self._server: TokenServer | None = None

    def start(self) -> Location:
        """Starts the workers, tries them, and opens the server; returns where it is.

        Call it on a thread that outlives the workers: Linux ends a worker with the thread that
        started it.

        Raises:
            ValueError: The rewards cannot be loaded, or fail at the trial, on this machine.
            ConfigError: The workers died while they started.
            TimeoutError: No worker was ready in time.
        """
        self.processes.start()
        if self.trial is not None and isinstance(
            failure := asyncio.run(self.processes.trial(self.trial)), str
        ):
            raise ValueError(f"the trial response, which rank 0 has scored, fails here: {failure}.")
        routes = [web.post(SCORE, self._score), web.get(SCORE, self._ready)]
        self._server = TokenServer(self.endpoint, self.token, routes, longest_request=0)
        return self._server.location()

    def stop(self) -> None:
        """Ends the server and the workers, whatever they are doing. Idempotent."""
        self.processes.close()
        if self._server is not None:
            self._server.close()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _score(self, request: web.Request) -> web.Response:
        count = request.headers.get(COUNT, "")
        if not count.isdecimal():
            raise web.HTTPBadRequest(text=f"a job says in {COUNT} how many responses it has")
        outcomes = await self.processes.outcomes(Job(int(count), await request.read()))
        values = [list(each) if isinstance(each, Scored) else each for each in outcomes]
        return web.json_response({"outcomes": values, "replaced": self.processes.replaced})
