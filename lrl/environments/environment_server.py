"""The server of an environment on another machine: plays a run's episodes in processes of its own.

    POST   /episodes/<n>    a message of an episode, as `worker` has them; returns the answer
    DELETE /episodes/<n>    ends it
    DELETE /episodes        ends all

Behind the run's token, as a generator is: whoever has it can run code here by an episode. The
processes are those of rank 0 (`lrl.environments.processes`), so an episode has the same deadlines,
memory limit and kinds of failure wherever it is played.
"""

import asyncio
from typing import Any

from aiohttp import web

from lrl.environments.processes import EnvironmentProcess, EnvironmentProcesses
from lrl.environments.remote_pool import EPISODES
from lrl.environments.worker import WorkerSpec
from lrl.errors import EnvironmentLost, EpisodeError
from lrl.system.endpoint import Endpoint, Location
from lrl.system.token_server import TokenServer

ONE = EPISODES + r"/{number:\d+}"


class EnvironmentServer:
    """The processes and the server of an environment. Use: `start()`, then it plays, then `stop()`.

    Args:
        spec: The environment and its limits.
        workers: Processes that play.
        endpoint: The address that it listens on, and its TLS.
        token: The run's.
    """

    def __init__(self, spec: WorkerSpec, workers: int, endpoint: Endpoint, token: str) -> None:
        self.endpoint = endpoint
        self.token = token
        self.processes = EnvironmentProcesses(spec, workers)
        self._start_timeout_s = spec.start_timeout_s
        self._playing: dict[int, EnvironmentProcess] = {}
        self._server: TokenServer | None = None

    def start(self) -> Location:
        """Opens the server and starts the processes; returns where it is.

        Raises:
            ValueError: The environment cannot be loaded on this machine.
            ConfigError: A process has ended while it started.
            TimeoutError: It was not ready in time.
        """
        routes = [
            web.post(ONE, self._message),
            web.delete(ONE, self._end),
            web.delete(EPISODES, self._end_all),
        ]
        self._server = TokenServer(self.endpoint, self.token, routes, longest_request=0)
        # On the server's thread, which lives as long as they must.
        limit_s = 2 * self._start_timeout_s
        self._server.wait(self._wait_ready(), limit_s, "starting the processes")
        return self._server.location()

    def stop(self) -> None:
        """Ends the server and the processes, whatever they are doing. Idempotent."""
        self.processes.close()
        if self._server is not None:
            self._server.close()

    async def _wait_ready(self) -> None:
        await self.processes.alive()[0].wait_ready()

    async def _message(self, request: web.Request) -> web.Response:
        answer = await self._answer(int(request.match_info["number"]), await request.json())
        return web.json_response({"answer": answer, "replaced": self.processes.replaced})

    async def _answer(self, number: int, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if "prompt" in message:
                process = min(self.processes.alive(), key=lambda process: process.episodes)
                process.episodes += 1
                self._playing[number] = process
            if number not in self._playing:
                raise EnvironmentLost("it has ended all its episodes")
            reply = await self._playing[number].ask(number, **message)
            return reply._asdict()
        except EpisodeError as error:
            return {"failed": [error.kind, error.message]}
        except EnvironmentLost as error:
            return {"lost": str(error), "by_other": error.by_other}
        except asyncio.CancelledError:
            # Rank 0 waits no longer; its end of the episode may have come before.
            self._close(number)
            raise

    async def _end(self, request: web.Request) -> web.Response:
        message = await request.json()
        self._close(int(request.match_info["number"]), message["ended"])
        return web.json_response({})

    async def _end_all(self, request: web.Request) -> web.Response:
        for number in list(self._playing):
            self._close(number)
        return web.json_response({})

    def _close(self, number: int, why: str = "") -> None:
        if (process := self._playing.pop(number, None)) is not None:
            process.episodes -= 1
            process.tell(number, why)
