"""A reward host: takes jobs from a run on another machine, and scores them with worker processes of its own.

The workers are those of rank 0 (`lrl.rewards.processes`), so a response has the same deadlines, memory limit and kinds
of failure wherever it is scored. The host opens the only connection: it needs no port and no certificate.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket as sockets
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp

from lrl.rewards import messages
from lrl.rewards.job import Job
from lrl.rewards.processes import Processes

CONNECT_S = 10.0
"""Seconds for a connection, and for the run's first message."""
AGAIN_S = 1.0
"""Seconds between two attempts to reach a run whose connection is lost."""
REFUSED_S, SILENT_S = 5.0, 180.0
"""Seconds after which a run has ended: while its machine says that nobody listens there, and while nothing answers."""
RUN_ENDED = "the run has ended, and so does it"


class HostError(RuntimeError):
    """A run that does not take this host; the message has the remedy."""


class RewardHost:
    """A reward host of the run at `url`.

    Args:
        url: The run's address.
        headers: They carry the run's token.
        trust: TLS context that accepts the run's certificate; None for plain HTTP.
        workers: Processes that score.
        number: The number that the run has given it already; None to get one.
        say: Prints a line.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        trust: ssl.SSLContext | None,
        workers: int,
        number: int | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.url, self.headers, self.trust = url, headers, trust
        self.workers, self.number, self.say = workers, number, say
        self._run = ""  # which run has given the number
        self._processes: Processes | None = None
        self._ready = self._ended = False
        self._heard = time.monotonic()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Scores until the run ends, or SIGINT or SIGTERM comes.

        Raises:
            HostError: The run does not answer, or does not take this host.
            ValueError: The rewards cannot be loaded, or fail at the trial, on this machine.
            Exception: Any other failure of the workers' start.
        """
        loop, own = asyncio.get_running_loop(), asyncio.current_task()
        assert own is not None, "it is a coroutine"
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, own.cancel)
        try:
            async with aiohttp.ClientSession(headers=self.headers) as session:
                while not self._ended:
                    await self._connect(session)
            self.say(RUN_ENDED)
        except asyncio.CancelledError:
            self.say("ends; others score its responses")
        finally:
            if self._processes is not None:
                self._processes.close()

    async def _connect(self, session: aiohttp.ClientSession) -> None:
        """Holds one connection, from its opening to its end."""
        words = {"node": sockets.gethostname(), "run": self._run}
        words |= {} if self.number is None else {"number": str(self.number)}
        try:
            async with asyncio.timeout(CONNECT_S):
                socket = await session.ws_connect(
                    self.url + messages.ROUTE,
                    params=words,
                    ssl=True if self.trust is None else self.trust,
                    autoping=False,  # so that `_converse` sees the pings
                    max_msg_size=0,
                )
        except aiohttp.WSServerHandshakeError as error:
            self._rejected(error.status)
        except (aiohttp.ClientError, OSError) as error:
            await self._not_reached(error)
        else:
            try:
                await self._converse(socket)
            finally:
                await socket.close()
            if self._failure is not None:
                raise self._failure
            if not self._ended:
                await asyncio.sleep(AGAIN_S)

    def _rejected(self, status: int) -> None:
        if self._ready:  # another run has its port
            self._ended = True
            return
        why = {401: "the token is not the run's (LRL_TOKEN)", 404: "it takes no reward hosts, as it trains nothing"}
        raise HostError(f"{self.url}: {why.get(status, f'it responded {status}')}.")

    async def _not_reached(self, error: Exception) -> None:
        if not self._ready:
            raise HostError(
                f"The run does not answer at {self.url} ({error!r}). It may have ended, or this machine does not reach "
                "it there: strategy.server.host must be an address that other machines reach."
            ) from error
        refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)
        self._ended = time.monotonic() - self._heard > (REFUSED_S if refused else SILENT_S)
        await asyncio.sleep(AGAIN_S)

    async def _converse(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Obeys the run until the connection ends, and drops what is not done by then: others score it."""
        tasks: set[asyncio.Task[None]] = set()

        def start(work: Coroutine[Any, Any, None]) -> None:
            task = asyncio.create_task(self._guarded(work, socket))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        silence_s = CONNECT_S
        try:
            while True:
                message = await socket.receive(silence_s)
                if message.type is aiohttp.WSMsgType.BINARY:
                    start(self._score(socket, *messages.unpack(message.data)))
                elif message.type is aiohttp.WSMsgType.PING:
                    await socket.pong(message.data)
                elif message.type is aiohttp.WSMsgType.PONG:
                    continue
                elif message.type is not aiohttp.WSMsgType.TEXT:
                    break
                elif "end" in (order := json.loads(message.data)):
                    self._ended = True
                    break
                else:
                    welcome = _read_welcome(order)
                    silence_s = 2 * welcome.heartbeat_s
                    start(_ping(socket, welcome.heartbeat_s))
                    start(self._begin(socket, welcome))
        except (TimeoutError, ConnectionError):  # the connection is lost
            return
        finally:
            self._heard = time.monotonic()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guarded(self, work: Coroutine[Any, Any, None], socket: aiohttp.ClientWebSocketResponse) -> None:
        """Ends the connection if the work fails."""
        try:
            await work
        except ConnectionError:  # the end of the connection, which `_converse` sees, too
            return
        except Exception as error:  # raised again by `_connect`
            self._failure = error
            await socket.close()

    async def _begin(self, socket: aiohttp.ClientWebSocketResponse, welcome: messages.Welcome) -> None:
        """Starts the workers, unless they run, and says so."""
        self.number, self._run = welcome.number, welcome.run
        processes = self._processes
        if processes is not None and processes.spec != welcome.spec:  # a new run at the same address
            processes.close()
            processes, self._ready = None, False
        self._processes = processes = processes or Processes(welcome.spec, self.workers, "this host")
        if not self._ready:
            try:
                await asyncio.to_thread(processes.start)
                if welcome.trial is not None and isinstance(failure := await processes.trial(welcome.trial), str):
                    raise ValueError(f"the trial response, which rank 0 has scored, fails here: {failure}.")
            except Exception as error:
                await socket.send_str(json.dumps({"refused": str(error)}))
                raise
            self._ready = True
            self.say(f"scores with {self.workers} workers. Ctrl-C ends it")
        await socket.send_str(json.dumps({"ready": self.workers}))

    async def _score(self, socket: aiohttp.ClientWebSocketResponse, number: int, job: Job) -> None:
        assert self._processes is not None, "a run sends jobs to a host that is ready"
        outcomes = await self._processes.outcomes(job)
        await socket.send_str(messages.report(number, outcomes, self._processes.replaced))


def _read_welcome(order: dict[str, Any]) -> messages.Welcome:
    try:
        return messages.read_welcome(order)
    except (KeyError, TypeError, ValueError) as error:
        raise HostError(f"The run is of another release of lrl ({error!r}): use the run's.") from error


async def _ping(socket: aiohttp.ClientWebSocketResponse, every_s: float) -> None:
    # Rank 0 sends no pings while it gets outcomes, so its silence would prove nothing.
    while True:
        await asyncio.sleep(every_s)
        await socket.ping()
