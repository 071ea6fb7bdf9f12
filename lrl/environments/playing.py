"""What a worker does with an environment: plays many episodes at once, each as a task of one event
loop."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import time
import types
from base64 import b64decode
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from lrl.environments.base import Environment, ToolCall, Written
from lrl.environments.play import Play, Reply
from lrl.system import processes
from lrl.workers.user_code import OUT_OF_MEMORY, message_of, where_raised
from lrl.workers.worker import LONGEST_LINE, ProcessClock, RunningCode, UserCode, line


@dataclass(frozen=True)
class Playing(UserCode):
    """The environment of a worker."""

    environment: Environment
    timeout_s: float
    """Most seconds for a reply."""

    def serve(self, connection: socket.socket, running: RunningCode) -> None:
        """Plays episodes."""
        if self.environment.writes_prompt:
            processes.adopt_orphans()  # an agent's processes end with its episode, before this one
        asyncio.run(self._serve(connection, running))

    async def _serve(self, connection: socket.socket, running: RunningCode) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
        player = Player(self, running, lambda message: writer.write(line(message)))
        watch = asyncio.create_task(player.watch())
        while call := await reader.readline():
            player.obey(json.loads(call))
        watch.cancel()
        os._exit(0)  # whatever the environment still does


@dataclass
class _Episode:
    """An episode, and since when it owes a reply."""

    play: Play
    task: asyncio.Task[None] | None = None
    ran_s: float = 0.0
    """Seconds in which its own code ran."""
    owes_since: float | None = None
    """On the clock of `Player`; None while the policy writes."""


class Player:
    """The episodes of a worker.

    Args:
        playing: The environment and its limit.
        running: Tells the other end whose code runs.
        say: Sends the other end a message.
    """

    def __init__(
        self, playing: Playing, running: RunningCode, say: Callable[[dict[str, Any]], None]
    ) -> None:
        self._environment = playing.environment
        self._timeout_s = playing.timeout_s
        self._running = running
        self._say = say
        self._clock = ProcessClock(os.getpid())
        self._ran_s = 0.0  # seconds in which the code of any episode ran
        self._episodes: dict[int, _Episode] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        """Ends of episodes whose turn the policy still writes: they answer that turn."""

    def obey(self, call: dict[str, Any]) -> None:
        """Makes a call."""
        job = call["job"]
        if "begin" in call:
            self._begin(job, b64decode(call["begin"]))
        elif "turn" in call and job in self._kept:
            self._say(self._kept.pop(job))
        elif (episode := self._episodes.get(job)) is None:
            self._kept.pop(job, None)  # it has ended meanwhile
        elif "turn" in call:
            episode.owes_since = self._seconds_of(episode)
            turn = call["turn"]
            calls = [ToolCall(*each) for each in turn["calls"]]
            episode.play.wrote(Written(**turn | {"calls": calls}))
        else:
            self._end(job, call["end"])

    async def watch(self) -> None:
        """Ends the episodes whose reply is late."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 8))
            for job, episode in list(self._episodes.items()):
                since = episode.owes_since
                if since is not None and self._seconds_of(episode) - since > self._timeout_s:
                    self._fail(job, "timeout", f"no reply after {self._timeout_s:g} s")

    def _begin(self, job: int, packed: bytes) -> None:
        play = Play(self._environment, lambda reply: self._replied(job, reply))
        episode = self._episodes[job] = _Episode(play)
        episode.owes_since = self._seconds_of(episode)
        episode.task = asyncio.ensure_future(self._play(job, episode, packed))

    async def _play(self, job: int, episode: _Episode, packed: bytes) -> None:
        try:
            prompt, columns = pickle.loads(packed)
            played = episode.play.run(prompt, columns)
            await _in_stretches(played, lambda: self._enter(job), lambda s: self._leave(episode, s))
        except MemoryError:
            self._enter(job)
            os._exit(OUT_OF_MEMORY)  # its memory may stay full, and fail other episodes
        except BaseException as error:  # SystemExit, too, is one episode's
            self._fail(job, "exception", message_of(error) + where_raised(error))
        self._episodes.pop(job, None)

    def _enter(self, job: int) -> None:
        self._running.stretch += 1
        self._running.item = 0
        self._running.job = job

    def _leave(self, episode: _Episode, seconds: float) -> None:
        self._running.job = 0
        self._ran_s += seconds
        episode.ran_s += seconds

    def _seconds_of(self, episode: _Episode) -> float:
        """Returns seconds on a clock that stands still while the code of other episodes runs."""
        return self._clock.seconds - (self._ran_s - episode.ran_s)

    def _replied(self, job: int, reply: Reply) -> None:
        if job in self._episodes:
            # Before the reply is sent: a death after it is not this episode's fault.
            self._running.job = 0
            self._answer(job, {"answer": reply._asdict()})

    def _fail(self, job: int, kind: str, message: str) -> None:
        if job in self._episodes:
            self._answer(job, {"failed": [kind, message]})
            self._end(job, f"{kind}: {message}")

    def _answer(self, job: int, answer: dict[str, Any]) -> None:
        """Answers the last call. An agent may end while a turn is written for it: that end is
        kept."""
        episode = self._episodes[job]
        message = {"job": job, **answer}
        if episode.owes_since is None:
            self._kept[job] = message
        else:
            self._say(message)
            episode.owes_since = None  # not before: what cannot be sent is still owed

    def _end(self, job: int, why: str) -> None:
        """Ends an episode; who still asks in it gets to know `why` from the cancellation."""
        task = self._episodes.pop(job).task
        if task is not None and task is not asyncio.current_task():
            task.cancel(why)


@types.coroutine
def _in_stretches(
    played: Coroutine[Any, Any, None], enter: Callable[[], None], leave: Callable[[float], None]
) -> Generator[Any, Any, None]:
    """Awaits `played`; calls `enter` before and `leave`, with the seconds, after each stretch in
    which its code runs."""
    advance, value = played.send, None
    while True:
        enter()
        began = time.monotonic()
        try:
            awaited = advance(value)
        except StopIteration:
            return
        finally:
            leave(time.monotonic() - began)
        try:
            value = yield awaited
            advance = played.send
        except BaseException as error:
            advance, value = played.throw, error
