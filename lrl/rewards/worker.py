"""Code of a reward worker: calls the rewards on plain strings, and checks the values that they return.

An exception fails one response. A worker that runs out of memory exits, since its memory may stay full and fail the
next responses. Neither this module nor its imports import torch, so a worker starts in a fraction of a second.
"""

import asyncio
import inspect
import math
import os
import pickle
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.job_state import JobState, Outcome, Scored
from lrl.runtime.parent_death import die_with

OUT_OF_MEMORY = 112
"""Exit code of a worker at its memory limit."""
_LONGEST_MESSAGE = 500
_NOT_THE_USERS = (
    *(str(Path(__file__).parents[1]) + os.sep, "<frozen "),
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Where the files of lrl and of libraries are."""

_rewards: list[Reward] | str = "no rewards were loaded"
_job_states: Sequence[JobState] = ()  # shared with the trainer; job n uses number n modulo their length
_runner = asyncio.Runner()  # one event loop for the worker's life: a user's HTTP session belongs to its loop


def initialise(rewards: bytes, trainer: int, memory_gib: float | None, job_states: Sequence[JobState]) -> None:
    """Prepares a new worker of the process `trainer`: loads the pickled list of rewards, then limits the memory.

    If the rewards cannot be loaded, every later call says so. pebble makes workers ignore SIGINT: Ctrl-C reaches all
    processes, but the trainer decides.
    """
    global _rewards, _job_states
    _job_states = job_states
    die_with(trainer)  # also if the trainer gets SIGKILL while a reward never returns
    # pebble's own handler is Python code and waits for Python's lock; the default kills at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _rewards = pickle.loads(rewards)
    except Exception as error:
        _rewards = f"a reward cannot be loaded in a reward worker: {_message(error)}{_where_raised(error)}"
    _limit_memory(memory_gib)


def ready() -> None:
    """Returns if this worker can score; raises ValueError if its rewards could not be loaded."""
    if isinstance(_rewards, str):
        raise ValueError(_rewards)


def score(number: int, job: bytes, budget_s: float) -> list[Outcome]:
    """Returns the outcomes of responses to one prompt, scored one after another; `async` rewards overlap.

    After `budget_s` seconds only the first response is still begun, and none awaited. `number` is above 0.
    """
    count, packed = pickle.loads(job)  # packed: prompt, and text and columns of each response
    if isinstance(_rewards, str):
        return [f"exception: {_rewards}"] * count
    try:
        prompt, responses = pickle.loads(packed)
        return _runner.run(_score_all(_rewards, number, prompt, responses, budget_s))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        return [f"exception: the row cannot be loaded in a reward worker: {_message(error)}"] * count


async def _score_all(
    rewards: list[Reward], number: int, prompt: str, responses: list[tuple[str, dict[str, Any]]], budget_s: float
) -> Any:
    until = time.monotonic() + budget_s
    state = _job_states[number % len(_job_states)]
    state.begin(number)
    tasks = [
        asyncio.create_task(_score_one(rewards, state, i, (prompt, text), columns, until))
        for i, (text, columns) in enumerate(responses)
    ]
    done, late = await asyncio.wait(tasks, timeout=budget_s)
    for task in late:
        task.cancel()
    state.end()
    timed_out = f"timeout: no reward after {budget_s:g} s"
    return [task.result() if task in done else timed_out for task in tasks]


async def _score_one(
    rewards: list[Reward], state: JobState, index: int, texts: tuple[str, str], columns: dict[str, Any], until: float
) -> Outcome:
    if index > 0 and time.monotonic() > until:
        return None
    outcome = await _weighted_sum(rewards, state, index, texts, columns)
    state.judged(index, outcome)
    return outcome


async def _weighted_sum(
    rewards: list[Reward], state: JobState, index: int, texts: tuple[str, str], columns: dict[str, Any]
) -> Outcome:
    total = 0.0
    parts: dict[str, float] = {}
    gave_up = ""
    for number, reward in enumerate(rewards):
        try:
            state.running(index, number)
            value = reward(*texts, **columns)
            state.uncertain()  # while it is awaited, others run
            value = await value if inspect.isawaitable(value) else value
            found = parts_of(reward.name, value)
        except MemoryError:
            state.running(index, number)
            state.out_of_memory = 1
            os._exit(OUT_OF_MEMORY)
        except BadValueError as error:
            return f"{error.kind}: {reward.name}: {error}"[:_LONGEST_MESSAGE]
        except SystemExit as error:
            return f"crash: {reward.name}: {_message(error)}"
        except BaseException as error:  # the trainer would raise CancelledError or KeyboardInterrupt again
            return f"exception: {reward.name}: {_message(error)}{_where_raised(error)}"
        if isinstance(value, GaveUp):
            gave_up = gave_up or f"{reward.name}: {value.reason}"[:_LONGEST_MESSAGE]
        parts |= found
        total += reward.weight * sum(found.values())
    return Scored(total, parts, gave_up) if math.isfinite(total) else f"nan: the weighted sum of {parts} is {total}"


class BadValueError(Exception):
    """A reward returned a value that is no reward. `kind` is one of `lrl.rewards.failure_stats.KINDS`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def parts_of(name: str, value: Any) -> dict[str, float]:
    """Returns the numbers in the value of reward `name`: `{name: value}`, or `{"name/part": number}` for a dict.

    Raises BadValueError of kind `nan`, `wrong_type` or `wrong_shape`.
    """
    if not isinstance(value, dict):
        return {name: _number(name, value)}
    if not value:
        raise BadValueError("wrong_shape", "an empty dict; give at least one part")
    if unnamed := [part for part in value if not isinstance(part, str)]:
        raise BadValueError("wrong_type", f"a dict with the key {shortened(unnamed[0])}; name the parts with strings")
    return {f"{name}/{part}": _number(part, number) for part, number in value.items()}


def _number(part: str, value: Any) -> float:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # one number, wrapped by numpy or torch
        value = value.item()
    given = f"{part} is {shortened(value)} ({type(value).__name__})"
    if not isinstance(value, Real):  # True and False are, as 1 and 0
        if hasattr(value, "__len__") and not isinstance(value, str | bytes):
            raise BadValueError("wrong_shape", f"{given}; a reward is one number, or a dict of numbers by name")
        raise BadValueError("wrong_type", f"{given}; a reward is a float: write float(...) if that is what you mean")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadValueError("nan", f"{given}; a reward is finite")
    return number


def _message(error: BaseException) -> str:
    """Returns type and message of an exception, whose `__str__` may raise."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {message}"[:_LONGEST_MESSAGE]


def _where_raised(error: BaseException) -> str:
    """Returns the last line of the user's code in the traceback, in brackets; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _limit_memory(gib: float | None) -> None:
    """Limits writable private memory (RLIMIT_DATA), counted from what is allocated when the rewards are loaded.

    RLIMIT_AS would also count memory that is only reserved: CUDA, a Java machine or one malloc arena for each thread
    reserve many GiB and use none of it.
    """
    if gib is None or sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
