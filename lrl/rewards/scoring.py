"""What a worker does with rewards: calls them on plain strings, and checks what they return.

An exception fails one response. A worker that runs out of memory exits: its memory may stay full
and fail the next responses. Nothing here imports torch, so a worker starts in a fraction of a
second.
"""

import asyncio
import copy
import inspect
import os
import pickle
import socket
import sys
from base64 import b64decode
from dataclasses import dataclass
from numbers import Real
from reprlib import repr as shortened
from typing import Any, NamedTuple

from lrl.errors import CountedError
from lrl.rewards.base import LARGEST_REWARD, GaveUp, Reward, unwrapped
from lrl.system.output import writable
from lrl.workers import worker

Response = tuple[str, dict[str, Any]]
"""Text and columns."""


class Scored(NamedTuple):
    """The reward of a response."""

    reward: float  # weighted sum
    parts: dict[str, float]  # values by the names of the rewards, before the weights
    gave_up: str = ""  # the reward that gave up on the response, and why


Outcome = Scored | str | None
"""Of a response: its reward, a failure as in `Rollout.reward_failure`, or None if it was not
tried."""


@dataclass
class Scoring:
    """The rewards of a worker."""

    rewards: list[Reward]
    timeout_s: float  # for one response, all rewards together

    def serve(self, connection: socket.socket, running: worker.RunningCode) -> None:
        """Scores a group at each call."""
        self._running = running
        # One event loop for the worker's life: a user's HTTP session belongs to its loop. With a
        # factory it is not also the thread's current loop, which a plain reward may use as its own.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        for call in worker.calls(connection):
            job = call["job"]
            running.begin(job)
            try:
                answer = {"answer": self._score(*pickle.loads(b64decode(call["begin"])))}
            except MemoryError:
                os._exit(worker.OUT_OF_MEMORY)
            except Exception as error:
                why = f"the row cannot be loaded in a reward worker: {worker.message_of(error)}"
                answer = {"failed": ["exception", why]}
            finally:
                running.job = 0  # if the worker dies later, another job is at fault
            connection.sendall(worker.line({"job": job, **answer}))

    def _score(self, prompt: str, responses: list[Response]) -> list[Outcome]:
        """Returns the outcomes. After `timeout_s` no response is begun but the first; then the
        `async` rewards of all are awaited together, for as long. No event loop runs while a plain
        reward is called: it may run one of its own."""
        clock = worker.process_clock(os.getpid())
        outcomes: list[Outcome] = [None] * len(responses)
        awaited: dict[int, list[Any]] = {}
        for item, (text, columns) in enumerate(responses):
            if item > 0 and clock() > self.timeout_s:
                break
            self._running.stretch += 1
            values = self._call(item, (prompt, text), columns)
            if isinstance(values, list) and any(map(inspect.isawaitable, values)):
                awaited[item] = values
                outcomes[item] = f"timeout: no reward after {self.timeout_s:g} s"
            else:
                outcomes[item] = values if isinstance(values, str) else _sum(values)
        if awaited:
            self._running.stretch += 1
            alone = len(responses) == 1
            left_s = max(0.0, self.timeout_s - clock()) if alone else self.timeout_s
            for item, outcome in self._runner.run(self._await_all(awaited, left_s)).items():
                outcomes[item] = outcome
        return outcomes

    def _call(self, item: int, texts: tuple[str, str], columns: dict[str, Any]) -> list[Any] | str:
        """Returns what each reward gives for a response, awaitables included, or a failure."""
        values: list[Any] = []
        for reward in self.rewards:
            self._running.item = item
            try:
                # Its own copy: a reward may change it, and no other call must see that.
                value = reward(*texts, **copy.deepcopy(columns))
                values.append(value if inspect.isawaitable(value) else _scored(reward, value))
            except BaseException as error:  # CancelledError and KeyboardInterrupt are one reward's
                for value in filter(inspect.iscoroutine, values):
                    value.close()
                return _failure(reward, error)
            finally:
                self._running.item = worker.NOBODY
        return values

    async def _await_all(self, awaited: dict[int, list[Any]], limit_s: float) -> dict[int, Outcome]:
        """Returns the outcomes that are finished in time, by the index of the response."""
        clock = worker.process_clock(os.getpid())
        tasks = {
            asyncio.create_task(self._await_one(item, values)): item
            for item, values in awaited.items()
        }
        late = set(tasks)
        while late and (left_s := limit_s - clock()) > 0:
            _, late = await asyncio.wait(late, timeout=left_s)
        for task in late:
            task.cancel()
        return {item: task.result() for task, item in tasks.items() if task not in late}

    async def _await_one(self, item: int, values: list[Any]) -> Outcome:
        found: list[Scored] = []
        for reward, value in zip(self.rewards, values, strict=True):
            try:
                found.append(_scored(reward, await value) if inspect.isawaitable(value) else value)
            except BaseException as error:
                if isinstance(error, MemoryError):
                    self._running.item = item
                return _failure(reward, error)
        return _sum(found)


def _scored(reward: Reward, value: Any) -> Scored:
    parts = parts_of(reward.name, value)
    gave_up = f"{reward.name}: {value.reason}" if isinstance(value, GaveUp) else ""
    return Scored(reward.weight * sum(parts.values()), parts, gave_up[: worker.LONGEST_MESSAGE])


def _sum(found: list[Scored]) -> Outcome:
    total = sum((one.reward for one in found), 0.0)
    parts = {name: number for one in found for name, number in one.parts.items()}
    if not abs(total) <= LARGEST_REWARD:
        return f"nan: the weighted sum of {parts} is {total}, above {LARGEST_REWARD:g} in size"
    return Scored(total, parts, next((one.gave_up for one in found if one.gave_up), ""))


def _failure(reward: Reward, error: BaseException) -> str:
    if isinstance(error, MemoryError):
        os._exit(worker.OUT_OF_MEMORY)
    if isinstance(error, CountedError):
        return f"{error.kind}: {reward.name}: {error.message}"[: worker.LONGEST_MESSAGE]
    kind = "crash" if isinstance(error, SystemExit) else "exception"
    return f"{kind}: {reward.name}: {worker.message_of(error)}{worker.where_raised(error)}"


def parts_of(name: str, value: Any) -> dict[str, float]:
    """Returns `{name: value}`, or `{"name/part": number}` for a dict; raises CountedError of kind
    `nan`, `wrong_type` or `wrong_shape`."""
    if not isinstance(value, dict):
        return {name: _number(name, value)}
    if not value:
        raise CountedError("wrong_shape", "an empty dict; give at least one part")
    if unnamed := [part for part in value if not isinstance(part, str)]:
        text = f"a dict with the key {shortened(unnamed[0])}; name the parts with strings"
        raise CountedError("wrong_type", text)
    return {writable(f"{name}/{part}"): _number(part, number) for part, number in value.items()}


def _number(part: str, value: Any) -> float:
    value = unwrapped(value)
    shown = f"{part} is {shortened(value)} ({type(value).__name__})"
    if not isinstance(value, Real):  # True and False are, as 1 and 0
        is_several = hasattr(value, "__len__") and not isinstance(value, str | bytes)
        kind = "wrong_shape" if is_several else "wrong_type"
        raise CountedError(kind, f"{shown}; a reward is one number, or a dict of numbers by name")
    size: Any = abs(value)
    if not size <= sys.float_info.max:
        raise CountedError("nan", f"{shown}; a reward is finite")
    return float(value)
