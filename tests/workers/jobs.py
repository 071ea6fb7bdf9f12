"""The two kinds of jobs, groups of responses and episodes; each does what it is told."""

from __future__ import annotations

from typing import Any

from lrl.environments import Written
from lrl.environments.pool import EnvironmentPool
from lrl.errors import EpisodeError
from lrl.rewards import RewardPool
from lrl.types import Prompt
from lrl.workers.pool import WorkerPool
from tests import made
from tests.environments.worlds import Odd
from tests.event_loop import run
from tests.rewards import odd_rewards

TIMEOUT_S = 1.0
PROMPT = Prompt(id=3, token_ids=[1], text="go", columns={"level": 2, "prompt": "not this one"})
ORDERS = {"fine": "give 1", "crash": "segfault", "leak": "hog", "hang": "loop"}
"""What a reward is told for what an environment does."""


def say(text: str) -> Written:
    return Written(text, [])


def groups(timeout_s: float = TIMEOUT_S) -> RewardPool:
    limits: dict[str, Any] = {"memory_gib": 0.5, "max_failures": 1.0}
    return RewardPool([odd_rewards.obey], workers=1, timeout_s=timeout_s, **limits)


def episodes(timeout_s: float = TIMEOUT_S, workers: int = 1) -> EnvironmentPool:
    return EnvironmentPool(Odd(), workers, turn_timeout_s=timeout_s, memory_gib=0.5)


async def failure(pool: RewardPool | EnvironmentPool, order: str) -> str:
    """Why a group of one response or an episode of one turn has failed; empty if it has not."""
    if isinstance(pool, RewardPool):
        rollout = made.rollout(text=ORDERS[order])
        await pool.score(PROMPT, [rollout])
        return rollout.reward_failure or ""
    episode = pool.open(PROMPT)
    try:
        await episode.begin()
        await episode.reply(say(order))
    except EpisodeError as error:
        return str(error)
    finally:
        episode.close()
    return ""


def failures(pool: RewardPool | EnvironmentPool) -> dict[str, str]:
    return {order: run(failure(pool, order)) for order in ORDERS}


def pid_of(pool: WorkerPool) -> int:
    """The process in which the only worker of this machine runs the code."""
    (worker,) = pool.local._processes
    return int(worker._running.pid)
