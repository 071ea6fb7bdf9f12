"""What runs inside a reward worker: rewards called on plain strings, each answer's exceptions kept to itself.

This module imports neither torch nor anything that does, so a worker starts in a fraction of a second.

A worker must die with the trainer, also when the trainer is killed (SIGKILL) while a reward never returns. Only the
kernel can do that: a thread that watches the trainer cannot run while, say, a regular expression holds Python's lock.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import os
import pickle
import signal
import sys
import threading
import time
from numbers import Real
from typing import Any

from lrl.rewards.base import Reward

Outcome = tuple[float, dict[str, float]] | str | None
"""Of one answer: weighted sum and parts; or a failure as in `Rollout.reward_failure`; or None, not scored in time."""

_PR_SET_PDEATHSIG = 1
_LONGEST_MESSAGE = 500

_rewards: list[Reward] | str = "no rewards were loaded"
_runner = asyncio.Runner()  # one event loop for the worker's life: a user's HTTP session belongs to its loop


def begin(rewards: bytes, owner: int) -> None:
    """Sets a new worker up. pebble ignores SIGINT already: Ctrl-C reaches all processes, but the trainer decides.

    Args:
        rewards: Pickled list of `Reward`s. One that cannot be loaded is reported by every later call.
        owner: Process id of the trainer.
    """
    global _rewards
    _die_with(owner)
    # pebble's own handler is Python code and waits for Python's lock; the default kills at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _rewards = pickle.loads(rewards)
    except Exception as error:
        _rewards = f"a reward cannot be loaded in a reward worker: {type(error).__name__}: {error}"


def ready() -> None:
    """Returns if this worker can score.

    Raises:
        RuntimeError: If its rewards could not be loaded.
    """
    if isinstance(_rewards, str):
        raise RuntimeError(_rewards)


def score(job: bytes, budget_s: float) -> list[Outcome] | str:
    """Scores answers to one prompt, one after another; `async` rewards overlap.

    Args:
        job: Pickled `(prompt, answers)`: the prompt's text, and the text and columns of each answer.
        budget_s: Seconds after which no answer is begun and none awaited any longer.

    Returns:
        One outcome for each answer; or a failure, if a column of the row cannot be loaded here.
    """
    try:
        prompt, answers = pickle.loads(job)
    except Exception as error:
        return f"error: the row cannot be loaded in a reward worker: {type(error).__name__}: {error}"
    return _runner.run(_score_all(prompt, answers, budget_s))


async def _score_all(prompt: str, answers: list[tuple[str, dict[str, Any]]], budget_s: float) -> list[Outcome]:
    until = time.monotonic() + budget_s
    tasks = [asyncio.create_task(_score_one(prompt, text, columns, until)) for text, columns in answers]
    done, late = await asyncio.wait(tasks, timeout=budget_s)
    for task in late:
        task.cancel()
    return [task.result() if task in done else None for task in tasks]


async def _score_one(prompt: str, response: str, columns: dict[str, Any], until: float) -> Outcome:
    if isinstance(_rewards, str):
        return f"error: {_rewards}"
    if time.monotonic() > until:
        return None
    total = 0.0
    parts: dict[str, float] = {}
    for reward in _rewards:
        try:
            value = reward(prompt, response, **columns)
            found = _parts(reward.name, await value if inspect.isawaitable(value) else value)
        except (Exception, SystemExit) as error:
            return f"error: {reward.name}: {type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        parts |= found
        total += reward.weight * sum(found.values())
    return total, parts


def _parts(name: str, value: Any) -> dict[str, float]:
    """A reward's value by name; raises TypeError or ValueError for what is not a finite number or a dict of them."""
    found = {f"{name}/{part}": number for part, number in value.items()} if isinstance(value, dict) else {name: value}
    if not found:
        raise ValueError("an empty dict is not a reward")
    for part, number in found.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise TypeError(f"{part} is {number!r} ({type(number).__name__}); a reward is a float")
        if not math.isfinite(number):
            raise ValueError(f"{part} is {number}; a reward is finite")
    return {part: float(number) for part, number in found.items()}


def _die_with(owner: int) -> None:
    if sys.platform != "linux":  # no kernel help: a thread does what it can
        threading.Thread(target=_watch, args=(owner,), daemon=True).start()
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; a reward worker could outlive its run")
    if os.getppid() != owner:  # it died before the line above
        os._exit(1)


def _watch(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(1.0)
    os._exit(1)
