"""The server of a member with workers: makes a run's calls on workers of its own.

    POST   /calls/<pool>/<job>    a call; returns the answer
    DELETE /calls/<pool>/<job>    ends an episode
    DELETE /calls                 ends all episodes

Behind the run's token, as a generator is: whoever has it can run code here. The workers are those of
rank 0 (`lrl.workers.local`), so a call has the same deadlines, memory limit and kinds of failure on
every machine.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from lrl.errors import CallFailed, WorkerLost
from lrl.system.auth import TokenServer
from lrl.system.endpoint import Endpoint, Location
from lrl.workers.local import LocalWorkers
from lrl.workers.process import WorkerSpec
from lrl.workers.remote import CALLS


class WorkersServer:
    """The workers and the server of a member. Use: `start()`, then it works, then `stop()`.

    Args:
        terms: What each pool of the run has its workers run, by its name, as JSON.
        count: Workers of each.
        endpoint: The address that it listens on, and its TLS.
        token: The run's.
    """

    def __init__(self, terms: dict[str, Any], count: int, endpoint: Endpoint, token: str) -> None:
        self.endpoint = endpoint
        self.token = token
        self.workers = {
            name: LocalWorkers(WorkerSpec.from_json(spec), count) for name, spec in terms.items()
        }
        self._server: TokenServer | None = None

    def start(self) -> Location:
        """Starts the workers and opens the server; returns where it is.

        Raises:
            ConfigError: The code cannot be loaded on this machine, or a worker died while it
                started.
            TimeoutError: No worker was ready in time.
        """
        for workers in self.workers.values():
            workers.start()
        one = f"{CALLS}/{{pool:{'|'.join(self.workers)}}}/{{job:\\d+}}"
        routes = [
            web.post(one, self._call),
            web.delete(one, self._end),
            web.delete(CALLS, self._end_all),
        ]
        self._server = TokenServer(self.endpoint, self.token, routes, longest_request=0)
        return self._server.location()

    def stop(self) -> None:
        """Ends the server and the workers, whatever they are doing. Idempotent."""
        for workers in self.workers.values():
            workers.close()
        if self._server is not None:
            self._server.close()

    async def _call(self, request: web.Request) -> web.Response:
        workers, job = self._asked(request)
        answered = await _answer(workers, job, await request.json())
        return web.json_response({**answered, "replaced": workers.replaced})

    async def _end(self, request: web.Request) -> web.Response:
        workers, job = self._asked(request)
        workers.tell(job, (await request.json())["end"])
        return web.json_response({})

    async def _end_all(self, request: web.Request) -> web.Response:
        for workers in self.workers.values():
            workers.tell_all()
        return web.json_response({})

    def _asked(self, request: web.Request) -> tuple[LocalWorkers, int]:
        return self.workers[request.match_info["pool"]], int(request.match_info["job"])


async def _answer(workers: LocalWorkers, job: int, call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": await workers.ask(job, call)}
    except CallFailed as error:
        return {"failed": [error.kind, error.message, error.item, error.part]}
    except WorkerLost as error:
        return {"lost": str(error), "by_other": error.by_other}
    except asyncio.CancelledError:
        # Rank 0 waits no longer; its end of the episode may have come before.
        workers.tell(job, "")
        raise
