"""Responses to score, and pools that score them."""

import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import pytest

from lrl.rewards import RewardPool
from lrl.rewards.pool import KINDS, FailureStats
from lrl.types import Prompt
from tests import made
from tests.event_loop import LOOP, run

PROMPT = Prompt(id=0, token_ids=[1], text="Do as you are told.")


def rollouts_of(*responses, **fields):
    return [made.rollout(text=text, **fields) for text in responses]


def scored(pool, *responses, columns=None, **fields):
    rollouts = rollouts_of(*responses, **fields)
    run(pool.score(replace(PROMPT, columns=columns or {}), rollouts))
    return rollouts


@contextmanager
def started(*rewards, first=None, **limits):
    pool = RewardPool(*rewards, **limits)
    try:
        pool.start(LOOP, first)
        yield pool
    finally:
        pool.close()


def start_afresh(pool, max_failures=1.0):
    """Resets the counts of the pool; its workers stay."""
    pool._failure_stats = FailureStats(max_failures)
    pool._parts = None
    return pool


def counted(pool):
    """Returns the counts of responses that are not 0."""
    names = ("scored", "zero", "retried", *KINDS)
    return {name: pool.counts[name] for name in names if pool.counts[name]}


def _lacking():
    """Why bubblewrap can make no sandbox here, asked without lrl's own code."""
    if (program := shutil.which("bwrap")) is None:
        return "bubblewrap is not installed"
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 else f"bubblewrap cannot be used here: {done.stderr.strip()}"


LACKING = _lacking()
needs_bubblewrap = pytest.mark.skipif(bool(LACKING), reason=LACKING)
