"""What runs inside a reward worker: rewards called on plain strings, each answer's exceptions kept to itself.

This module imports neither torch nor anything that does, so a worker starts in a fraction of a second.

A worker must die with the trainer, also when the trainer is killed (SIGKILL) while a reward never returns.

A worker that is out of memory ends: what filled it may stay, and would fail the next answers.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.job_state import JobState, Outcome, Scored
from lrl.rewards.validation import BadValueError, parts_of
from lrl.runtime.parent_death import die_with

OUT_OF_MEMORY = 112
"""Exit code of a worker at its memory limit."""
_LONGEST_MESSAGE = 500
_NOT_THE_USERS = (
    *(str(Path(__file__).parents[1]) + os.sep, "<frozen "),
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Where lrl and libraries are."""

_rewards: list[Reward] | str = "no rewards were loaded"
_places: Sequence[JobState] = ()
_runner = asyncio.Runner()  # one event loop for the worker's life: a user's HTTP session belongs to its loop


def begin(rewards: bytes, owner: int, memory_gib: float | None, places: Sequence[JobState]) -> None:
    """Sets a new worker up. pebble ignores SIGINT already: Ctrl-C reaches all processes, but the trainer decides.

    Args:
        rewards: Pickled list of `Reward`s. One that cannot be loaded is reported by every later call.
        owner: Process id of the trainer.
        memory_gib: What scoring may allocate beyond what the loaded rewards hold, in GiB; None for no limit.
        places: Shared with the trainer; job n writes to place n modulo their number.
    """
    global _rewards, _places
    _places = places
    die_with(owner)
    # pebble's own handler is Python code and waits for Python's lock; the default kills at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _rewards = pickle.loads(rewards)
    except Exception as error:
        _rewards = f"a reward cannot be loaded in a reward worker: {_said(error)}{where_raised(error)}"
    _limit_memory(memory_gib)


def ready() -> None:
    """Returns if this worker can score.

    Raises:
        ValueError: If its rewards could not be loaded.
    """
    if isinstance(_rewards, str):
        raise ValueError(_rewards)


def score(number: int, job: bytes, budget_s: float) -> list[Outcome]:
    """Scores answers to one prompt, one after another; `async` rewards overlap.

    Args:
        number: Of the job, above 0; told apart by it in its place.
        job: Pickled `(answers, prompt, columns)`: how many there are; and pickled once more, the prompt's text, and
            the text and columns of each answer.
        budget_s: Seconds after which no answer but the first is begun, and none awaited any longer.

    Returns:
        One outcome for each answer.
    """
    count, packed = pickle.loads(job)
    try:
        prompt, answers = pickle.loads(packed)
        return _runner.run(_score_all(number, prompt, answers, budget_s))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except Exception as error:
        return [f"exception: the row cannot be loaded in a reward worker: {_said(error)}"] * count


async def _score_all(number: int, prompt: str, answers: list[tuple[str, dict[str, Any]]], budget_s: float) -> Any:
    until = time.monotonic() + budget_s
    place = _places[number % len(_places)]
    place.begin(number)
    tasks = [
        asyncio.create_task(_score_one(place, i, prompt, text, columns, until))
        for i, (text, columns) in enumerate(answers)
    ]
    done, late = await asyncio.wait(tasks, timeout=budget_s)
    for task in late:
        task.cancel()
    place.end()
    over_time = f"timeout: no reward after {budget_s:g} s"
    return [task.result() if task in done else over_time for task in tasks]


async def _score_one(
    place: JobState, answer: int, prompt: str, response: str, columns: dict[str, Any], until: float
) -> Outcome:
    if isinstance(_rewards, str):
        return f"exception: {_rewards}"
    if answer > 0 and time.monotonic() > until:
        return None
    outcome = await _weighted_sum(_rewards, place, answer, (prompt, response), columns)
    place.ended(answer, outcome)
    return outcome


async def _weighted_sum(
    rewards: list[Reward], place: JobState, answer: int, texts: tuple[str, str], columns: dict[str, Any]
) -> Outcome:
    total = 0.0
    parts: dict[str, float] = {}
    gave_up = ""
    for index, reward in enumerate(rewards):
        try:
            place.at(answer, index)
            value = reward(*texts, **columns)
            place.uncertain()  # while it is awaited, others run
            value = await value if inspect.isawaitable(value) else value
            found = parts_of(reward.name, value)
        except MemoryError:
            place.out_of_memory(answer, index)
            os._exit(OUT_OF_MEMORY)
        except BadValueError as error:
            return f"{error.kind}: {reward.name}: {error}"[:_LONGEST_MESSAGE]
        except SystemExit as error:
            return f"crash: {reward.name}: {_said(error)}"
        except BaseException as error:  # CancelledError or KeyboardInterrupt would go on in the trainer
            return f"exception: {reward.name}: {_said(error)}{where_raised(error)}"
        if isinstance(value, GaveUp):
            gave_up = gave_up or f"{reward.name}: {value.reason}"[:_LONGEST_MESSAGE]
        parts |= found
        total += reward.weight * sum(found.values())
    return Scored(total, parts, gave_up) if math.isfinite(total) else f"nan: the weighted sum of {parts} is {total}"


def _said(error: BaseException) -> str:
    """Type and message; an exception may fail to say the latter."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {message}"[:_LONGEST_MESSAGE]


def where_raised(error: BaseException) -> str:
    """The line of the user's own code that raised, in brackets; empty if lrl's or a library's code did by itself."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _limit_memory(gib: float | None) -> None:
    """Limit writable private memory (RLIMIT_DATA), counted from what is there when the rewards are loaded.

    RLIMIT_AS would count what is only reserved, too: CUDA, a Java machine or one malloc arena for each thread reserve
    many GiB and use none of it.
    """
    if gib is None or sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
