"""Helpers of the pool's tests: responses to score, and a look at which processes live."""

import asyncio
import time
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from lrl.rewards import RewardPool
from lrl.rewards.failure_stats import KINDS, FailureStats
from lrl.types import Prompt, Rollout

PROMPT = Prompt(id=0, token_ids=[1], text="Do as you are told.")


def rollouts_of(*responses, finish_reason="stop"):
    tokens = {"token_ids": [1, 2], "logprobs": [0.0, 0.0], "versions": [0, 0]}
    return [
        Rollout(**deepcopy(tokens), finish_reason=finish_reason, text=text) for text in responses
    ]


def scored(pool, *responses, columns=None, **fields):
    rollouts = rollouts_of(*responses, **fields)
    asyncio.run(pool.score(replace(PROMPT, columns=columns or {}), rollouts))
    return rollouts


@contextmanager
def started(*rewards, first=None, **limits):
    """A pool with its workers."""
    pool = RewardPool(*rewards, **limits)
    pool.start(first)
    try:
        yield pool
    finally:
        pool.close()


def start_afresh(pool, max_failures=1.0):
    """Resets the counts of the pool; its workers stay."""
    pool._failure_stats = FailureStats(max_failures)
    pool._parts = None
    return pool


def counted(pool):
    """Returns the counts of responses that are not 0; the number of lost workers is not always
    certain."""
    names = ("scored", "zero", "retried", *KINDS)
    return {name: pool.counts[name] for name in names if pool.counts[name]}


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def all_gone(pids, within_s=60.0):
    deadline = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def children(pid):
    """Returns the processes that the threads of `pid` have started; a thread may end meanwhile."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return found


def is_tracker(pid):
    """Returns whether this is Python's resource tracker, which outlives the workers."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
