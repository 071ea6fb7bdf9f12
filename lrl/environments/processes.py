"""The processes of an environment on one machine, each with many episodes: a process that hangs or
dies can be killed alone, and costs the episode at fault; the others of that process are played
again.
"""

import asyncio
import json
import logging
import multiprocessing
import os
import socket
import threading
import time
from typing import Any

from lrl.environments import worker
from lrl.environments.play import Reply
from lrl.environments.worker import LONGEST_LINE, Progress, WorkerSpec
from lrl.errors import ConfigError, EnvironmentLost, EpisodeError
from lrl.system.foreign_code import GUARD, OUT_OF_MEMORY, cause_of_death
from lrl.system.process_clock import ProcessClock

log = logging.getLogger(__name__)

_POLL_S = 1.0
"""Seconds between two looks at a process."""
_END_S = 5.0
"""Seconds for the end of a process whose connection has ended."""


class EnvironmentProcesses:
    """Processes that start when they are needed, and are replaced when they have ended. Use them on
    one event loop, whose thread outlives them, and `close()`.

    Args:
        spec: Their environment and limits.
        workers: How many.
    """

    def __init__(self, spec: WorkerSpec, workers: int) -> None:
        self.replaced = 0
        """Processes that were killed or died, and were replaced."""
        self._spec = spec
        self._workers = workers
        self._processes: list[EnvironmentProcess] = []
        self._lock = threading.Lock()  # `close` comes from another thread
        self._closed = False

    def alive(self) -> list["EnvironmentProcess"]:
        """Returns all of them; raises EnvironmentLost after `close`."""
        with self._lock:
            if self._closed:
                raise EnvironmentLost("the run has ended its processes")
            alive = [process for process in self._processes if process.alive]
            self.replaced += len(self._processes) - len(alive)
            while len(alive) < self._workers:
                alive.append(EnvironmentProcess(self._spec))
            self._processes = alive
            return list(alive)

    def open(self) -> None:
        """Allows processes, also after `close`."""
        self._closed = False

    def close(self) -> None:
        """Kills all of them, whatever they are doing. May be called twice."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
            self._processes = []


class EnvironmentProcess:
    """One process, with the episodes that it plays; see `lrl.environments.pool.Player`."""

    name = "rank 0"
    workers = 1

    def __init__(self, spec: WorkerSpec) -> None:
        self.episodes = 0
        self._spec = spec
        self._ending = False
        self._lost = ""  # why it has ended
        self._ended_by_episode = False
        self._asked: dict[int, tuple[asyncio.Future[Reply], float]] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Spawned, not forked: the trainer has threads, pipes and sockets.
        context = multiprocessing.get_context("spawn")
        self._progress: Any = context.RawValue(Progress)
        ours, theirs = socket.socketpair()
        self._process = context.Process(
            target=worker.main, args=(theirs, spec, os.getpid(), self._progress), daemon=True
        )
        self._process.start()
        theirs.close()
        self._connection = asyncio.ensure_future(
            asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
        )
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._watch())]

    @property
    def alive(self) -> bool:
        """Whether it plays episodes."""
        return not self._lost

    async def wait_ready(self) -> None:
        """Waits until it can play; raises ConfigError if it cannot load the environment or ends
        meanwhile, and TimeoutError after the spec's `start_timeout_s`."""
        try:
            async with asyncio.timeout(self._spec.start_timeout_s):
                await self._ready
        except TimeoutError:
            raise TimeoutError(
                "No process of the environment was ready after data.worker_start_timeout_s="
                f"{self._spec.start_timeout_s:g}. It imports the script that is run and the module "
                "of the environment: see which is slow, or raise it."
            ) from None
        except EnvironmentLost as error:
            raise ConfigError(
                "The process of the environment has ended while it started; its own message is "
                f"above. It imports the script that is run. {GUARD}"
            ) from error

    async def ask(self, number: int, **message: Any) -> Reply:
        """Sends an episode's message, and returns the reply.

        Raises:
            EpisodeError: The episode has failed.
            EnvironmentLost: The process has ended through no fault of the episode.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer, time.monotonic()
        try:
            _, writer = await self._connection
            if self._lost:
                raise self._loss()
            _send(writer, _line(number, message))
            return await answer
        finally:
            del self._asked[number]

    def tell(self, number: int, why: str) -> None:
        """Sends the end of an episode."""
        if self._connection.done() and not self._lost:
            _send(self._connection.result()[1], _line(number, {"ended": why}))

    def kill(self) -> None:
        """Ends the process with the run. May be called on any thread, and twice."""
        self._ending = True
        self._lost = "the run has ended its processes"
        self._process.terminate()
        self._process.join(_END_S)

    async def _listen(self) -> None:
        reader, writer = await self._connection
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except OSError as error:  # it has ended with what we had sent unread; `_end` says why
            log.debug("The connection of a process of the environment has ended: %r", error)
        except ValueError as error:
            log.warning("What a process of the environment sent is no reply: %s", error)
        writer.close()
        await self._end()

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"ready": True}:
                self._ready.set_result(None)
            case {"refused": str(why)}:
                self._ready.set_exception(
                    ConfigError(
                        f"data.environment cannot be loaded in its process: {why}. The process "
                        "imports its module anew, without what this process has set up: see that "
                        "it can be imported by itself."
                    )
                )
            case {"episode": int(number), "failed": [str(kind), str(text)]}:
                self._answer(number, EpisodeError(kind, text))
            case {
                "episode": int(number),
                "observation": observation,
                "done": done,
                "reward": reward,
                "tools": tools,
                "after": after,
            }:
                self._answer(number, Reply(observation, done, reward, tuple(tools), after=after))

    def _answer(self, number: int, answer: Reply | Exception) -> None:
        future, _ = self._asked.get(number, (None, 0.0))
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    async def _watch(self) -> None:
        """Kills the process if the code of an episode runs for too long, or nothing replies."""
        stretch, clock = 0, ProcessClock(self._progress.worker)
        latest_s = self._spec.silence_s
        while not self._ending:
            await asyncio.sleep(min(_POLL_S, self._spec.timeout_s / 4))
            progress = self._progress
            if not progress.episode or progress.stretch != stretch:
                stretch = progress.stretch
                clock = ProcessClock(self._progress.worker)
            elif clock.seconds > self._spec.timeout_s:
                await self._end("tool_timeout", f"no reply after {self._spec.timeout_s:g} s")
            if any(time.monotonic() - since > latest_s for _, since in self._asked.values()):
                await self._end("environment_error", f"its process was silent for {latest_s:g} s")

    async def _end(self, kind: str = "environment_error", why: str = "") -> None:
        """Ends the process, or notes its end; fails the episode whose code ran, and has the others
        played again."""
        if self._ending:
            return
        self._ending = True
        running = self._progress.episode
        if not why:
            end = time.monotonic() + _END_S
            while self._process.exitcode is None and time.monotonic() < end:
                await asyncio.sleep(0.01)
            why = self._cause()
        self._process.terminate()
        self._lost = why
        log.warning("A process of the environment is replaced: %s", why)
        self._ended_by_episode = running in self._asked
        for number in list(self._asked):
            at_fault = number == running
            self._answer(number, EpisodeError(kind, why) if at_fault else self._loss())
        if not self._ready.done():
            self._ready.set_exception(self._loss())
            self._ready.exception()  # it may be that nobody waits for it

    def _loss(self) -> EnvironmentLost:
        return EnvironmentLost(self._lost, by_other=self._ended_by_episode)

    def _cause(self) -> str:
        if self._process.exitcode == OUT_OF_MEMORY:
            gib = self._spec.memory_gib
            limit = "" if gib is None else f"; data.environment_memory_gib is {gib:g}"
            return "MemoryError" + limit
        return cause_of_death(self._process.exitcode)


def _send(writer: asyncio.StreamWriter, line: bytes) -> None:
    """Sends a line, unless the connection has ended: its end answers what was asked."""
    if not writer.is_closing():
        writer.write(line)


def _line(number: int, message: dict[str, Any]) -> bytes:
    return json.dumps({"episode": number, **message}).encode() + b"\n"
