"""The processes of an environment, each with many episodes: a process that hangs or dies can be
killed alone, and costs the episode at fault; the others of that process are played again.
"""

import asyncio
import base64
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lrl.environments import worker
from lrl.environments.base import Environment, Written
from lrl.environments.play import Reply, check_opening
from lrl.environments.worker import LONGEST_LINE, Progress, WorkerSpec
from lrl.errors import ConfigError, EnvironmentLost, EpisodeError
from lrl.rewards.failure_stats import EPISODE_KINDS
from lrl.system.foreign_code import OUT_OF_MEMORY, cause_of_death, check_main, pickled
from lrl.system.process_clock import ProcessClock
from lrl.system.shadowed_modules import check_lrl, check_start
from lrl.types import Prompt

log = logging.getLogger(__name__)

START_S = 120.0
"""Seconds for the start of a process: interpreter, imports of the script and of the environment."""
_POLL_S = 1.0
"""Seconds between two looks at a process."""
_LONGEST_SHOWN = 80
_END_S = 5.0
"""Seconds for the end of a process whose connection has ended."""


class EnvironmentProcesses:
    """Plays episodes in processes that start when they are needed. Use it on one event loop, and
    `close()`.

    Args:
        environment: Plays them.
        workers: Processes on this machine.
        turn_timeout_s: Most seconds for a reply.
        memory_gib: Memory that a process may allocate, in GiB; None for no limit. Linux only.

    Raises:
        ConfigError: The environment cannot be sent to a process.
    """

    def __init__(
        self,
        environment: Environment,
        workers: int,
        *,
        turn_timeout_s: float,
        memory_gib: float | None,
    ) -> None:
        name = type(environment).__name__
        check_main("The processes of an environment")
        sent = pickled(
            environment,
            f"data.environment is {name}",
            "the process of an environment",
            remedy="Write it to a file (in a notebook, begin its cell with `%%writefile "
            f"my_environment.py`) and import {name} from there.",
        )
        self.name = name
        self.deterministic = environment.deterministic
        self.counts: Counter[str] = Counter()
        """Episodes `replayed` or `restarted`, and processes `replaced`."""
        self._spec = WorkerSpec(sent, turn_timeout_s, memory_gib)
        self._workers = workers
        self._processes: list[EnvironmentProcess] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # `close` comes from another thread
        self._closed = False

    def open(self, prompt: Prompt) -> "EpisodeElsewhere":
        """Opens an episode in the process with the fewest."""
        with self._lock:
            if self._closed:
                raise EnvironmentLost("the run has ended its processes")
            alive = [process for process in self._processes if process.alive]
            self.counts["replaced"] += len(self._processes) - len(alive)
            while len(alive) < self._workers:
                alive.append(EnvironmentProcess(self._spec))
            self._processes = alive
        process = min(alive, key=lambda process: process.episodes)
        return EpisodeElsewhere(process, next(self._numbers), prompt)

    def start(self, prompt: Prompt | None, turn: Written, check: Callable[[Reply], Any]) -> None:
        """Allows episodes, and plays the beginning of one in a process that ends again.

        Args:
            prompt: Its prompt; None to start the process alone.
            turn: Its first turn.
            check: Raises EpisodeError for a reply that the policy cannot read.

        Raises:
            ConfigError: The environment cannot be loaded, or the episode has failed.
            RuntimeError: The process has ended while it started.
            TimeoutError: The process did not start in time.
        """
        check_lrl()
        self._closed = False
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop, as in a notebook
            thread.submit(lambda: asyncio.run(self._try_out(prompt, turn, check))).result()

    async def _try_out(
        self, prompt: Prompt | None, turn: Written, check: Callable[[Reply], Any]
    ) -> None:
        process = EnvironmentProcess(self._spec)
        try:
            await process.wait_ready()
            if prompt is None:
                return
            episode = EpisodeElsewhere(process, 1, prompt)
            opening = await episode.begin()
            check_opening(opening)
            check(opening)
            check(await episode.reply(turn))
        except EpisodeError as error:
            raise ConfigError(
                f"data.environment was tried with prompt {prompt and prompt.id} and the turn "
                f"{turn.text[:_LONGEST_SHOWN]!r}, before any is sampled, and failed: {error}. "
                f"{EPISODE_KINDS[error.kind]}"
            ) from None
        finally:
            process.kill()

    def close(self) -> None:
        """Kills all processes, whatever they are doing. May be called twice."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
            self._processes = []


class EpisodeElsewhere:
    """An episode that a process plays; see `lrl.rollouts.episode.Conversation`."""

    def __init__(self, process: "EnvironmentProcess", number: int, prompt: Prompt) -> None:
        self._process = process
        self._number = number
        self._prompt = prompt
        process.episodes += 1

    async def begin(self) -> Reply:
        """Begins it."""
        packed = pickle.dumps((self._prompt.text, self._columns))
        return await self._process.ask(self._number, prompt=base64.b64encode(packed).decode())

    async def reply(self, turn: Written) -> Reply:
        """Gives it a turn, and returns the reply."""
        return await self._process.ask(self._number, **turn._asdict())

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self._process.episodes -= 1
        self._process.tell(self._number)

    @property
    def _columns(self) -> dict[str, Any]:
        """The row's other columns; its own `prompt` and `policy` would clash with the arguments."""
        columns = self._prompt.columns
        return {name: columns[name] for name in columns if name not in ("prompt", "policy")}


class EnvironmentProcess:
    """One process, with the episodes that it plays."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.episodes = 0
        self._spec = spec
        self._ending = False
        self._lost = ""  # why it has ended
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
        """Waits until it can play; see `EnvironmentProcesses.try_out`."""
        try:
            async with asyncio.timeout(START_S):
                await self._ready
        except TimeoutError:
            raise TimeoutError(
                f"The process of the environment was not ready after {START_S:.0f} s. It imports "
                "the script that is run and the module of the environment: see which is slow."
            ) from None
        except EnvironmentLost as error:
            check_start()
            raise RuntimeError(
                "The process of the environment has ended while it started; its own message is "
                "above. It imports the script that is run: what starts the training must stand "
                'under `if __name__ == "__main__":`.'
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
                raise EnvironmentLost(self._lost)
            writer.write(_line(number, message))
            return await answer
        finally:
            del self._asked[number]

    def tell(self, number: int) -> None:
        """Sends the end of an episode."""
        if self._connection.done() and not self._lost:
            self._connection.result()[1].write(_line(number, {}))

    def kill(self) -> None:
        """Ends the process with the run. May be called on any thread, and twice."""
        self._ending = True
        self._lost = "the run has ended its processes"
        self._process.kill()
        self._process.join(_END_S)

    async def _listen(self) -> None:
        reader, writer = await self._connection
        try:
            while line := await reader.readline():
                self._take(json.loads(line))
        except (OSError, ValueError) as error:  # the connection has ended, or what came is no reply
            log.warning("The process of the environment sends no more: %r", error)
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
            }:
                self._answer(number, Reply(observation, done, reward))

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
        stretch, clock = 0, ProcessClock(self._process.pid or 0)
        latest_s = START_S + 4 * self._spec.timeout_s
        while not self._ending:
            await asyncio.sleep(min(_POLL_S, self._spec.timeout_s / 4))
            progress = self._progress
            if not progress.episode or progress.stretch != stretch:
                stretch, clock = progress.stretch, ProcessClock(self._process.pid or 0)
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
        self._process.kill()
        self._lost = why
        log.warning("A process of the environment is replaced: %s", why)
        for number in list(self._asked):
            at_fault = number == running
            self._answer(number, EpisodeError(kind, why) if at_fault else EnvironmentLost(why))
        if not self._ready.done():
            self._ready.set_exception(EnvironmentLost(why))
            self._ready.exception()  # it may be that nobody waits for it

    def _cause(self) -> str:
        if self._process.exitcode == OUT_OF_MEMORY:
            gib = self._spec.memory_gib
            limit = "" if gib is None else f"; data.environment_memory_gib is {gib:g}"
            return "MemoryError" + limit
        return cause_of_death(self._process.exitcode)


def _line(number: int, message: dict[str, Any]) -> bytes:
    return json.dumps({"episode": number, **message}).encode() + b"\n"
