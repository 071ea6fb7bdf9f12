"""What a worker does with an environment: plays many episodes at once, each as a task of one event
loop that stops at each turn until the policy has written it."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import pickle
import socket
import time
import types
from base64 import b64decode
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from reprlib import repr as shortened
from typing import Any, NamedTuple

from lrl.environments.base import BEGINNING, Environment, Observation, ToolCall, Written
from lrl.errors import EpisodeError
from lrl.rewards.base import LARGEST_REWARD
from lrl.system import processes
from lrl.workers.worker import (
    LONGEST_LINE,
    OUT_OF_MEMORY,
    RunningCode,
    line,
    message_of,
    process_clock,
    where_raised,
)


class Reply(NamedTuple):
    """The reply of an environment to a turn, or to the beginning of an episode."""

    observation: Observation = ""
    done: bool = False
    reward: float = 0.0
    tools: Sequence[dict[str, Any]] = ()
    """See `Policy.turn`."""
    after: int | None = None
    """See `Policy.turn`."""


def check_opening(opening: Reply) -> None:
    """Raises EpisodeError if an episode has ended, or has a reward, before its first turn."""
    if opening.done or opening.reward:
        what = "ended" if opening.done else f"the reward {opening.reward}"
        text = f"the episode has {what} before the policy's first turn"
        raise EpisodeError("environment_error", text)


class Play:
    """The environment's side of an episode, played with a copy of `environment`; it is the `Policy`
    that this gets. `replied` receives each reply."""

    def __init__(self, environment: Environment, replied: Callable[[Reply], None]) -> None:
        self._environment = copy.deepcopy(environment)
        self._replied = replied
        self._written: asyncio.Queue[Written] = asyncio.Queue()
        self._asked = 0  # turns that the environment has asked for
        self._turns = 0  # turns that the policy has written
        self.task: asyncio.Task[None] | None = None
        """Runs it, for a `Player`."""
        self.ran_s = 0.0
        """Seconds in which its own code ran."""
        self.owes_since: float | None = None
        """Since when it owes a reply, on the clock of `Player`; None while the policy writes."""

    async def run(self, prompt: str, columns: dict[str, Any]) -> None:
        reward = await self._environment.rollout(self, prompt, **columns)
        self._replied(Reply("", True, finite(reward)))

    def wrote(self, turn: Written) -> None:
        """Gives the environment the turn for which it waits."""
        self._turns += 1
        self._written.put_nowait(turn)

    async def turn(
        self,
        observation: Observation = "",
        reward: float = 0.0,
        tools: Sequence[dict[str, Any]] = (),
        after: int | None = None,
    ) -> Written:
        if after is not None and not self._environment.branches:
            raise TypeError("`after` is given, and `branches` is not true in the environment")
        if after is not None and not BEGINNING <= after < self._turns:
            raise ValueError(f"`after` is {after}, and the policy has written {self._turns} turns")
        if self._asked > self._turns:
            raise RuntimeError(
                "`Policy.turn` is called before the turn before is whole: await one after the other"
            )
        reply = Reply(readable(observation), False, finite(reward), tuple(tools), after=after)
        self._asked += 1
        self._replied(reply)
        return await self._written.get()


def readable(observation: Any) -> Observation:
    """Returns an observation; raises TypeError for what is none."""
    match observation:
        case str():
            return observation
        case [*parts] if all(type(token) is int for token in parts):
            return observation
        case [*parts] if all(map(_is_message, parts)):
            return observation
    raise TypeError(
        f"the observation is {shortened(observation)}; give text, a list of token ids, or a list "
        'of chat messages such as {"role": "user", "content": "higher"}'
    )


def _is_message(value: Any) -> bool:
    match value:
        case {"role": str(), "content": str()}:
            return True
    return False


def finite(reward: Any) -> float:
    """Returns a reward; raises TypeError for what is none."""
    with suppress(OverflowError):  # a whole number beyond every float
        if isinstance(reward, Real) and abs(number := float(reward)) <= LARGEST_REWARD:
            return number
    raise TypeError(
        f"the reward is {shortened(reward)}; give a finite number of at most {LARGEST_REWARD:g}"
    )


@dataclass(eq=False)
class Player:
    """The environment of a worker, which plays its episodes."""

    environment: Environment
    timeout_s: float
    """Most seconds for a reply."""

    def serve(self, connection: socket.socket, running: RunningCode) -> None:
        if self.environment.writes_prompt:
            processes.adopt_orphans()  # an agent's processes end with its episode, before this one
        asyncio.run(self._serve(connection, running))

    async def _serve(self, connection: socket.socket, running: RunningCode) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
        self.begin(running, lambda message: writer.write(line(message)))
        watch = asyncio.create_task(self._watch())
        while call := await reader.readline():
            self.obey(json.loads(call))
        watch.cancel()
        os._exit(0)  # whatever the environment still does

    def begin(self, running: RunningCode, say: Callable[[dict[str, Any]], None]) -> None:
        """Begins without episodes. `running` tells rank 0 whose code runs; `say` sends to it."""
        self._running = running
        self._say = say
        self._clock = process_clock(os.getpid())
        self._ran_s = 0.0  # seconds in which the code of any episode ran
        self._episodes: dict[int, Play] = {}
        # Ends of episodes whose turn the policy still writes: they answer that turn.
        self._kept: dict[int, dict[str, Any]] = {}

    def obey(self, call: dict[str, Any]) -> None:
        job = call["job"]
        if "begin" in call:
            episode = Play(self.environment, lambda reply: self._replied(job, reply))
            self._episodes[job] = episode
            episode.owes_since = self._seconds_of(episode)
            played = self._play(job, episode, b64decode(call["begin"]))
            episode.task = asyncio.ensure_future(played)
        elif "turn" in call and job in self._kept:
            self._say(self._kept.pop(job))
        elif job not in self._episodes:
            self._kept.pop(job, None)  # it has ended meanwhile
        elif "turn" in call:
            episode = self._episodes[job]
            episode.owes_since = self._seconds_of(episode)
            turn = call["turn"]
            calls = [ToolCall(*each) for each in turn["calls"]]
            episode.wrote(Written(**turn | {"calls": calls}))
        else:
            self._end(job)

    async def _watch(self) -> None:
        """Ends the episodes whose reply is late."""
        while True:
            await asyncio.sleep(min(1.0, self.timeout_s / 8))
            for job, episode in list(self._episodes.items()):
                since = episode.owes_since
                if since is not None and self._seconds_of(episode) - since > self.timeout_s:
                    self._fail(job, "timeout", f"no reply after {self.timeout_s:g} s")

    async def _play(self, job: int, episode: Play, packed: bytes) -> None:
        try:
            prompt, columns = pickle.loads(packed)
            await self._in_stretches(job, episode, episode.run(prompt, columns))
        except MemoryError:
            self._running.job = job
            os._exit(OUT_OF_MEMORY)  # its memory may stay full, and fail other episodes
        except BaseException as error:  # SystemExit, too, is one episode's
            self._fail(job, "exception", message_of(error) + where_raised(error))
        self._episodes.pop(job, None)

    @types.coroutine
    def _in_stretches(
        self, job: int, episode: Play, played: Coroutine[Any, Any, None]
    ) -> Generator[Any, Any, None]:
        """Awaits `played`; notes each stretch in which its code runs."""
        advance, value = played.send, None
        while True:
            self._running.stretch += 1
            self._running.item = 0
            self._running.job = job
            began = time.monotonic()
            try:
                awaited = advance(value)
            except StopIteration:
                return
            finally:
                self._running.job = 0
                seconds = time.monotonic() - began
                self._ran_s += seconds
                episode.ran_s += seconds
            try:
                value = yield awaited
                advance = played.send
            except BaseException as error:
                advance, value = played.throw, error

    def _seconds_of(self, episode: Play) -> float:
        """Returns seconds on a clock that stands still while the code of other episodes runs."""
        return self._clock() - (self._ran_s - episode.ran_s)

    def _replied(self, job: int, reply: Reply) -> None:
        if job in self._episodes:
            # Before the reply is sent: a death after it is not this episode's fault.
            self._running.job = 0
            self._answer(job, {"answer": reply._asdict()})

    def _fail(self, job: int, kind: str, message: str) -> None:
        if job in self._episodes:
            self._answer(job, {"failed": [kind, message]})
            self._end(job)

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

    def _end(self, job: int) -> None:
        task = self._episodes.pop(job).task
        if task is not None and task is not asyncio.current_task():
            task.cancel()
