"""Code of an environment's process: plays many episodes at once, each as a task of one event loop.

It talks with rank 0 in lines of JSON over one socket. Rank 0 sends an episode's number with the
prompt that begins it, with a turn, or alone, which ends it. A reply is an observation, a reward and
whether the episode has ended, or the failure of the episode. On another machine a member is in the
place of rank 0, and passes all of it on.

Two clocks watch. This process ends what awaits something for too long. It cannot do that while
plain code runs; then rank 0 sees in `Progress` which episode runs, and kills the process.
"""

import asyncio
import base64
import ctypes
import json
import os
import pickle
import signal
import socket
import time
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import asdict, dataclass
from typing import Any

from lrl.environments.base import Environment, ToolCall, Written
from lrl.environments.play import Play, Reply
from lrl.system import processes
from lrl.system.foreign_code import OUT_OF_MEMORY, bind, limit_memory, message_of, where_raised
from lrl.system.process_clock import ProcessClock
from lrl.system.processes import die_with

LONGEST_LINE = 2**26
"""Bytes of a message."""


@dataclass(frozen=True)
class WorkerSpec:
    """The environment of a process, and its limits."""

    environment: bytes
    """Pickled."""
    timeout_s: float
    """Most seconds for a reply."""
    memory_gib: float | None
    start_timeout_s: float

    @property
    def silence_s(self) -> float:
        """Seconds by the wall after which a process that owes a reply has ended, whatever its own
        clocks say."""
        return self.start_timeout_s + 4 * self.timeout_s

    def to_json(self) -> dict[str, Any]:
        """Returns the fields of a JSON object."""
        return asdict(self) | {"environment": base64.b64encode(self.environment).decode()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "WorkerSpec":
        """Returns the spec in these fields; raises KeyError, TypeError or ValueError for others."""
        return cls(**fields | {"environment": base64.b64decode(fields["environment"])})


class Progress(ctypes.Structure):
    """The code that runs in the process, in memory that rank 0 reads."""

    _fields_ = [
        ("worker", ctypes.c_int64),  # its process id
        ("episode", ctypes.c_int64),  # whose code runs now; 0 if none
        ("stretch", ctypes.c_int64),  # counts how often one has begun to run
    ]


def main(connection: socket.socket, spec: WorkerSpec, trainer: int, progress: Progress) -> None:
    """Serves rank 0, the process `trainer`, until the connection ends; its parent then ends what the
    environment has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides
    die_with(trainer, signal.SIGTERM)
    parent = os.getpid()
    processes.fork()
    bind(parent)
    progress.worker = os.getpid()
    try:
        environment: Environment | str = pickle.loads(spec.environment)
    except Exception as error:
        environment = f"{message_of(error)}{where_raised(error)}"
    if isinstance(environment, Environment) and environment.writes_prompt:
        processes.adopt_orphans()  # an agent's processes end with its episode, before this one
    limit_memory(spec.memory_gib)
    asyncio.run(_serve(connection, environment, spec.timeout_s, progress))


async def _serve(
    connection: socket.socket, environment: Environment | str, timeout_s: float, progress: Progress
) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
    if isinstance(environment, str):
        writer.write(_line({"refused": environment}))
        await reader.read()  # rank 0 ends it
        return
    writer.write(_line({"ready": True}))
    worker = Worker(environment, timeout_s, progress, lambda message: writer.write(_line(message)))
    watch = asyncio.create_task(worker.watch())
    while line := await reader.readline():
        worker.obey(json.loads(line))
    watch.cancel()
    os._exit(0)  # whatever the environment still does


def _line(message: dict[str, Any]) -> bytes:
    """Returns the line of a message; raises TypeError or ValueError for one that rank 0 could not
    read."""
    line = json.dumps(message).encode() + b"\n"
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the reply has {len(line):,} bytes; at most {LONGEST_LINE:,} are sent")
    return line


class _Playing:
    """An episode, and since when it owes a reply."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.task: asyncio.Task[None] | None = None
        self.ran_s = 0.0
        """Seconds in which its own code ran."""
        self.owes_since: float | None = None
        """On the clock of `Worker`; None while the policy writes."""


class Worker:
    """The episodes of a process.

    Args:
        environment: Plays them.
        timeout_s: Most seconds for a reply.
        progress: Tells rank 0 whose code runs.
        say: Sends rank 0 a message.
    """

    def __init__(
        self,
        environment: Environment,
        timeout_s: float,
        progress: Progress,
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._progress = progress
        self._say = say
        self._clock = ProcessClock(os.getpid())
        self._ran_s = 0.0  # seconds in which the code of any episode ran
        self._playing: dict[int, _Playing] = {}
        self._kept: dict[int, dict[str, Any]] = {}
        """Ends of episodes whose turn the policy still writes: rank 0 gets them for that turn."""

    def obey(self, message: dict[str, Any]) -> None:
        """Handles a message of rank 0."""
        number = message["episode"]
        if "prompt" in message:
            self._begin(number, base64.b64decode(message["prompt"]))
        elif "text" in message and number in self._kept:
            self._say(self._kept.pop(number))
        elif (playing := self._playing.get(number)) is None:
            self._kept.pop(number, None)  # it has ended meanwhile
        elif "text" in message:
            self._owes(playing)
            calls = [ToolCall(*call) for call in message["calls"]]
            written = Written(message["text"], message["token_ids"], calls, message["content"])
            playing.play.wrote(written)
        else:
            self._end(number, message["ended"])

    async def watch(self) -> None:
        """Ends the episodes whose reply is late."""
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 8))
            for number, playing in list(self._playing.items()):
                since = playing.owes_since
                if since is not None and self._seconds_of(playing) - since > self._timeout_s:
                    self._fail(number, "tool_timeout", f"no reply after {self._timeout_s:g} s")

    def _begin(self, number: int, prompt: bytes) -> None:
        playing = self._playing[number] = _Playing(
            Play(self._environment, lambda reply: self._replied(number, reply))
        )
        self._owes(playing)
        playing.task = asyncio.ensure_future(self._play(number, playing, prompt))

    async def _play(self, number: int, playing: _Playing, prompt: bytes) -> None:
        try:
            text, columns = pickle.loads(prompt)
            played = playing.play.run(text, columns)
            await _in_stretches(
                played, lambda: self._enter(number), lambda s: self._leave(playing, s)
            )
        except MemoryError:
            self._enter(number)
            os._exit(OUT_OF_MEMORY)  # its memory may stay full, and fail other episodes
        except BaseException as error:  # SystemExit, too, is one episode's
            self._fail(number, "environment_error", message_of(error) + where_raised(error))
        self._playing.pop(number, None)

    def _enter(self, number: int) -> None:
        self._progress.stretch += 1
        self._progress.episode = number

    def _leave(self, playing: _Playing, seconds: float) -> None:
        self._progress.episode = 0
        self._ran_s += seconds
        playing.ran_s += seconds

    def _owes(self, playing: _Playing) -> None:
        playing.owes_since = self._seconds_of(playing)

    def _seconds_of(self, playing: _Playing) -> float:
        """Returns seconds on a clock that stands still while the code of other episodes runs."""
        return self._clock.seconds - (self._ran_s - playing.ran_s)

    def _replied(self, number: int, reply: Reply) -> None:
        if number in self._playing:
            # Before rank 0 has the reply: a death after it is not this episode's fault.
            self._progress.episode = 0
            self._answer(number, reply._asdict())

    def _fail(self, number: int, kind: str, message: str) -> None:
        if number in self._playing:
            self._answer(number, {"failed": [kind, message]})
            self._end(number, f"{kind}: {message}")

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        """Sends what rank 0 waits for. An agent may end while a turn is written for it: that end is
        kept."""
        playing = self._playing[number]
        message = {"episode": number, **answer}
        if playing.owes_since is None:
            self._kept[number] = message
        else:
            self._say(message)
            playing.owes_since = None  # not before: what cannot be sent is still owed

    def _end(self, number: int, why: str) -> None:
        """Ends an episode; who still asks in it gets to know `why` from the cancellation."""
        task = self._playing.pop(number).task
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
