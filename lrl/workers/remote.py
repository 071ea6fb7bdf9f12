"""The workers of other machines, which serve over HTTP: as rank 0 sees them, and their own side.

    POST   /calls/<pool>/<job>    a call; returns the answer
    DELETE /calls/<pool>/<job>    ends an episode
    DELETE /calls                 ends all episodes

What a lost member was asked fails at once, and whoever has asked gives it to others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from lrl.errors import CallFailed, WorkerLost
from lrl.system.auth import TokenServer, bearer
from lrl.system.endpoint import Endpoint, Location
from lrl.workers.process import LocalWorkers, WorkerSpec

CALLS = "/calls"
CHECK_S = 10.0  # for a connection to a member
LEAVE_S = 20.0  # that a leaving member has for the end of its work
FAILURES = ("exception", "timeout", "crash", "memory")


@dataclass(eq=False)
class RemoteWorkers:
    """The workers of one member, for all pools of a run; ValueError for an unreadable
    certificate."""

    number: int  # among the members of its kind
    node: str  # the name of its machine
    count: int  # processes that work there, for each of the run's pools
    location: Location
    token: str  # the run's

    def __post_init__(self) -> None:
        self.name = f"worker {self.number} on {self.node}"
        self.lost = ""  # why it gets no more work; empty if it does
        self.leaving_since: float | None = None  # in monotonic seconds; then it gets no new work
        self.jobs: Counter[str] = Counter()  # by their pool; counted by who gives and ends them
        self.replaced: Counter[str] = Counter()  # workers that were killed or died, by their pool
        self._trust = self.location.context()
        self._requests: set[asyncio.Task[Any]] = set()

    @property
    def idle(self) -> bool:
        return not self.jobs.total()

    async def begin(self) -> None:
        """Ends what it had before it was cut off; raises OSError if it does not answer or belongs
        to another run."""
        await self._request("DELETE", CALLS, CHECK_S)

    def lose(self, why: str) -> None:
        """Fails all that it was asked, and will be. May be called on any thread."""
        self.lost = self.lost or why
        for request in list(self._requests):
            request.get_loop().call_soon_threadsafe(request.cancel)

    async def ask(self, spec: WorkerSpec, job: int, call: dict[str, Any]) -> Any:
        """Makes a call of a job; see `lrl.workers.pool.WorkerJob`."""
        # Its workers have the deadlines of rank 0's. This one is for a member that does not answer,
        # and yet is alive.
        deadline_s = 2 * spec.limit_s(self.jobs[spec.name])
        found = await self._answered("POST", f"{CALLS}/{spec.name}/{job}", deadline_s, call)
        match found:
            case {"replaced": int(replaced)}:
                self.replaced[spec.name] = replaced
        match found:
            case {"failed": [str(kind), str(text), int() | None as item]} if kind in FAILURES:
                raise CallFailed(kind, f"{text} ({self.name})", item)
            case {"lost": str(why), "by_other": bool(by_other)}:
                raise WorkerLost(f"{why} ({self.name})", by_other=by_other)
            case {"answer": answer, "replaced": int()}:
                return answer
        self.lose(f"{str(found)[:80]!r} is no answer to a call")
        raise WorkerLost(self.lost)

    def end(self, spec: WorkerSpec, job: int) -> None:
        """Ends an episode."""
        if not self.lost and not spec.one_call:
            asyncio.ensure_future(self._end(f"{CALLS}/{spec.name}/{job}"))  # kept by `_requests`

    async def _end(self, route: str) -> None:
        with suppress(WorkerLost):  # then it has ended with all others
            await self._answered("DELETE", route, CHECK_S)

    async def _answered(
        self, method: str, route: str, deadline_s: float, message: dict[str, Any] | None = None
    ) -> Any:
        """Returns the JSON of a response; raises WorkerLost if the member is lost meanwhile, or does
        not answer."""
        request = asyncio.create_task(self._request(method, route, deadline_s, message))
        self._requests.add(request)
        try:
            if self.lost:
                raise WorkerLost(self.lost)
            return await request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.lost and task and not task.cancelling():  # `lose` has cancelled the request
                raise WorkerLost(self.lost) from None
            raise
        except OSError as error:
            self.lose(str(error))
            raise WorkerLost(self.lost) from error
        finally:
            request.cancel()
            self._requests.discard(request)

    async def _request(
        self, method: str, route: str, deadline_s: float, message: dict[str, Any] | None = None
    ) -> Any:
        """Returns the JSON of a response; raises OSError for none, or another status than 200."""
        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CHECK_S)
        # A connection for each request: a server may close an idle one as a request goes out on it.
        connector = aiohttp.TCPConnector(ssl=self._trust or True)
        headers = {"Authorization": bearer(self.token)}
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(
                    method,
                    self.location.url + route,
                    json=message or {},
                    headers=headers,
                    allow_redirects=False,  # the token is for this address alone
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


class WorkersServer(TokenServer):
    """A member's HTTP server: passes a run's calls to the workers of this machine. Anyone with the
    run's token can run code here.

    Args:
        terms: `WorkerSpec` of each pool of the run, by its name, as JSON.
        count: Workers of each.
        endpoint: The address that it listens on, and its TLS.
        token: The run's.
    """

    def __init__(self, terms: dict[str, Any], count: int, endpoint: Endpoint, token: str) -> None:
        self.workers = {
            name: LocalWorkers(WorkerSpec.from_json(spec), count) for name, spec in terms.items()
        }
        one = f"{CALLS}/{{pool:{'|'.join(self.workers)}}}/{{job:\\d+}}"
        routes = [
            web.post(one, self._call),
            web.delete(one, self._end),
            web.delete(CALLS, self._end_all),
        ]
        super().__init__(endpoint, token, routes, longest_request=0)

    def start(self) -> None:
        """Starts the workers (see `LocalWorkers.start`). Call `close` also after its errors."""
        for workers in self.workers.values():
            workers.start(self.loop)

    def close(self) -> None:
        for workers in self.workers.values():
            workers.close()
        super().close()

    async def _call(self, request: web.Request) -> web.Response:
        workers, job = self._asked(request)
        found: dict[str, Any]
        try:
            found = {"answer": await workers.ask(workers.spec, job, await request.json())}
        except CallFailed as error:
            found = {"failed": [error.kind, error.message, error.item]}
        except WorkerLost as error:
            found = {"lost": str(error), "by_other": error.by_other}
        except asyncio.CancelledError:
            # Rank 0 waits no longer, and may have ended the episode before it began here.
            workers.end(workers.spec, job)
            raise
        return web.json_response({**found, "replaced": workers.replaced})

    async def _end(self, request: web.Request) -> web.Response:
        workers, job = self._asked(request)
        workers.end(workers.spec, job)
        return web.json_response({})

    async def _end_all(self, request: web.Request) -> web.Response:
        for workers in self.workers.values():
            workers.end_all()
        return web.json_response({})

    def _asked(self, request: web.Request) -> tuple[LocalWorkers, int]:
        return self.workers[request.match_info["pool"]], int(request.match_info["job"])
