"""Code of a reward worker: calls the rewards on plain strings, and checks the values that they
return.

An exception fails one response. A worker that runs out of memory exits, since its memory may stay
full and fail the next responses. Neither this module nor its imports import torch, so a worker
starts in a fraction of a second.
"""

import asyncio
import copy
import inspect
import math
import os
import pickle
from collections.abc import Sequence
from numbers import Real
from reprlib import repr as shortened
from typing import Any, NamedTuple

from lrl.errors import CountedError
from lrl.rewards.base import LARGEST_REWARD, GaveUp, Reward
from lrl.rewards.job_state import JobState, Outcome, Scored
from lrl.system.foreign_code import (
    LONGEST_MESSAGE,
    OUT_OF_MEMORY,
    bind,
    limit_memory,
    message_of,
    where_raised,
)
from lrl.system.process_clock import ProcessClock
from lrl.system.writable_text import writable

_rewards: list[Reward] | str = "no rewards were loaded"
# Shared with the trainer; job n uses number n modulo their length.
_job_states: Sequence[JobState] = ()
# One event loop for the worker's life: a user's HTTP session belongs to its loop. With a factory
# it is not also the thread's current loop, which a plain reward may use as its own.
_runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)


def initialise(
    rewards: bytes, trainer: int, memory_gib: float | None, job_states: Sequence[JobState]
) -> None:
    """Prepares a new worker of the process `trainer`: loads the pickled list of rewards, then
    limits the memory.

    If the rewards cannot be loaded, every later call says so. pebble makes workers ignore SIGINT:
    Ctrl-C reaches all processes, but the trainer decides.
    """
    global _rewards, _job_states
    _job_states = job_states
    bind(trainer)  # also if the trainer gets SIGKILL while a reward never returns
    try:
        _rewards = pickle.loads(rewards)
    except Exception as error:
        _rewards = f"a reward cannot be loaded in a reward worker: {message_of(error)}{where_raised(error)}"
    limit_memory(memory_gib)


def ready() -> None:
    """Returns if this worker can score; raises ValueError if its rewards could not be loaded."""
    if isinstance(_rewards, str):
        raise ValueError(_rewards)


def score(number: int, job: bytes, budget_s: float) -> list[Outcome]:
    """Returns the outcomes of responses to one prompt, scored one after another.

    After `budget_s` seconds no response is begun but the first. Then the `async` rewards of all
    responses are awaited together, for as long. `number` is above 0.
    """
    count, packed = pickle.loads(job)  # packed: prompt, and text and columns of each response
    if isinstance(_rewards, str):
        return [f"exception: {_rewards}"] * count
    state = _job_states[number % len(_job_states)]
    state.begin(number)
    try:
        prompt, responses = pickle.loads(packed)
        outcomes = _score_all(
            _rewards, state, prompt=prompt, responses=responses, budget_s=budget_s
        )
        state.end()
        return outcomes
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        return [
            f"exception: the row cannot be loaded in a reward worker: {message_of(error)}"
        ] * count


def _score_all(
    rewards: list[Reward],
    state: JobState,
    prompt: str,
    responses: list[tuple[str, dict[str, Any]]],
    budget_s: float,
) -> list[Outcome]:
    # No event loop runs while a plain reward is called: it may run one of its own (`asyncio.run`).
    clock = ProcessClock(os.getpid())
    outcomes: list[Outcome] = [None] * len(responses)
    awaited: dict[int, list[Any]] = {}
    for index, (text, columns) in enumerate(responses):
        if index > 0 and clock.seconds > budget_s:
            break
        state.begin_stretch()
        values = _call(rewards, state, index=index, texts=(prompt, text), columns=columns)
        if isinstance(values, list) and any(map(inspect.isawaitable, values)):
            awaited[index] = values
        else:
            outcomes[index] = values if isinstance(values, str) else _weighted_sum(rewards, values)
            state.scored(index, outcomes[index])
    if awaited:
        state.begin_stretch()
        left_s = budget_s if len(responses) > 1 else max(0.0, budget_s - clock.seconds)
        found = _runner.run(_await_all(rewards, state, awaited, left_s))
        for index in awaited:
            outcomes[index] = found.get(index, f"timeout: no reward after {budget_s:g} s")
    return outcomes


def _call(
    rewards: list[Reward],
    state: JobState,
    index: int,
    texts: tuple[str, str],
    columns: dict[str, Any],
) -> list[Any] | str:
    """Returns the results of the rewards for a response, awaitables included, or the failure of
    one."""
    values: list[Any] = []
    for number, reward in enumerate(rewards):
        state.running(index, number)
        try:
            # Its own copy: a reward may change it, and the next one and the other responses must
            # not see that.
            value = reward(*texts, **copy.deepcopy(columns))
            values.append(value if inspect.isawaitable(value) else _found(reward, value))
        except BaseException as error:
            # The trainer would raise CancelledError or KeyboardInterrupt again.
            for value in filter(inspect.iscoroutine, values):
                value.close()
            return _failure(state, reward, error)
    state.uncertain()
    return values


async def _await_all(
    rewards: list[Reward], state: JobState, awaited: dict[int, list[Any]], budget_s: float
) -> dict[int, Outcome]:
    """Awaits for `budget_s` seconds; returns the finished outcomes by the index of the response."""
    clock = ProcessClock(os.getpid())
    tasks = {}
    for index, values in awaited.items():
        tasks[asyncio.create_task(_await_one(rewards, state, index, values))] = index
    late = set(tasks)
    while late and (left_s := budget_s - clock.seconds) > 0:
        _, late = await asyncio.wait(late, timeout=left_s)
    for task in late:
        task.cancel()
    return {index: task.result() for task, index in tasks.items() if task not in late}


async def _await_one(
    rewards: list[Reward], state: JobState, index: int, values: list[Any]
) -> Outcome:
    found: list[_Found] = []
    outcome: Outcome = None
    for number, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        try:
            found.append(_found(reward, await value) if inspect.isawaitable(value) else value)
        except BaseException as error:
            if isinstance(error, MemoryError):
                state.running(index, number)
            outcome = _failure(state, reward, error)
            break
    else:
        outcome = _weighted_sum(rewards, found)
    state.scored(index, outcome)
    return outcome


class _Found(NamedTuple):
    """The result of one reward for a response."""

    parts: dict[str, float]
    gave_up: str


def _found(reward: Reward, value: Any) -> _Found:
    gave_up = f"{reward.name}: {value.reason}" if isinstance(value, GaveUp) else ""
    return _Found(parts_of(reward.name, value), gave_up[:LONGEST_MESSAGE])


def _weighted_sum(rewards: list[Reward], found: list[_Found]) -> Outcome:
    total = 0.0
    parts: dict[str, float] = {}
    for reward, one in zip(rewards, found, strict=True):
        total += reward.weight * sum(one.parts.values())
        parts |= one.parts
    if not abs(total) <= LARGEST_REWARD:
        return (
            f"nan: the weighted sum of {parts} is {total}; its size is at most {LARGEST_REWARD:g}"
        )
    return Scored(total, parts, next((one.gave_up for one in found if one.gave_up), ""))


def _failure(state: JobState, reward: Reward, error: BaseException) -> str:
    """Returns the failure of a reward without a number; ends the worker if its memory is full."""
    if isinstance(error, MemoryError):
        state.out_of_memory = 1
        os._exit(OUT_OF_MEMORY)
    if isinstance(error, CountedError):
        return f"{error.kind}: {reward.name}: {error.message}"[:LONGEST_MESSAGE]
    kind = "crash" if isinstance(error, SystemExit) else "exception"
    message = f"{kind}: {reward.name}: {message_of(error)}"
    if kind == "exception":
        message += where_raised(error)
    if isinstance(error, RuntimeError) and "event loop" in message and "running" in message:
        message += (
            ". An event loop runs an `async def` reward: write `await f()` there for "
            "`asyncio.run(f())`, or define the reward with `def`"
        )
    return message


def parts_of(name: str, value: Any) -> dict[str, float]:
    """Returns the numbers in the value of reward `name`: `{name: value}`, or `{"name/part":
    number}` for a dict.

    Raises CountedError of kind `nan`, `wrong_type` or `wrong_shape`.
    """
    if not isinstance(value, dict):
        return {name: _number(name, value)}
    if not value:
        raise CountedError("wrong_shape", "an empty dict; give at least one part")
    if unnamed := [part for part in value if not isinstance(part, str)]:
        raise CountedError(
            "wrong_type",
            f"a dict with the key {shortened(unnamed[0])}; name the parts with strings",
        )
    return {writable(f"{name}/{part}"): _number(part, number) for part, number in value.items()}


def _number(part: str, value: Any) -> float:
    # One number, wrapped by numpy or torch.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    shown = f"{part} is {shortened(value)} ({type(value).__name__})"
    if not isinstance(value, Real):  # True and False are, as 1 and 0
        if hasattr(value, "__len__") and not isinstance(value, str | bytes):
            raise CountedError(
                "wrong_shape", f"{shown}; a reward is one number, or a dict of numbers by name"
            )
        remedy = (
            "does every branch of it return?"
            if value is None
            else "write float(...) if that is what you mean"
        )
        raise CountedError("wrong_type", f"{shown}; a reward is a float: {remedy}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise CountedError("nan", f"{shown}; a reward is finite")
    return number
