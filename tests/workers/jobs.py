"""The two kinds of jobs, groups of responses and episodes; each does what it is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

REWARDS = Path(__file__).parents[1] / "rewards"
sys.path.insert(0, str(REWARDS))  # workers import `odd_rewards` by this name

import odd_rewards  # noqa: E402

from lrl.environments import Written  # noqa: E402
from lrl.environments.pool import EnvironmentPool  # noqa: E402
from lrl.errors import EpisodeError, WorkerLost  # noqa: E402
from lrl.rewards import RewardPool  # noqa: E402
from lrl.types import Prompt  # noqa: E402
from lrl.workers.pool import WorkerPool  # noqa: E402
from tests import made  # noqa: E402
from tests.environments.worlds import Odd  # noqa: E402
from tests.event_loop import run  # noqa: E402

TIMEOUT_S = 1.5
PROMPT = Prompt(id=3, token_ids=[1], text="go", columns={"level": 2, "prompt": "not this one"})
ORDERS = {"fine": "give 1", "crash": "segfault", "leak": "hog", "hang": "loop"}
"""What a reward is told for what an environment does."""


def say(text: str) -> Written:
    return Written(text, [])


class Groups:
    """Groups of one response; `do` returns the failure, or nothing."""

    setting = "data.rewards"

    def __init__(self, workers: int = 1, timeout_s: float = TIMEOUT_S, **limits: Any) -> None:
        limits = {"memory_gib": 0.5, "max_failures": 1.0, **limits}
        self.pool = RewardPool([odd_rewards.obey], workers, timeout_s=timeout_s, **limits)

    @property
    def replaced(self) -> int:
        return self.pool.counts["replaced"]

    async def do(self, order: str) -> str:
        rollout = made.rollout(text=ORDERS[order])
        await self.pool.score(PROMPT, [rollout])
        return rollout.reward_failure or ""


class Episodes:
    """Episodes of one turn; what is lost is played again, as a run does."""

    setting = "data.environment"

    def __init__(self, workers: int = 1, timeout_s: float = TIMEOUT_S, **limits: Any) -> None:
        limits = {"memory_gib": 0.5, **limits}
        self.pool = EnvironmentPool(Odd(), workers, turn_timeout_s=timeout_s, **limits)

    @property
    def replaced(self) -> int:
        return self.pool.workers.replaced

    async def do(self, order: str) -> str:
        for _ in range(3):
            episode = self.pool.open(PROMPT)
            try:
                await episode.begin()
                await episode.reply(say(order))
            except WorkerLost as error:
                if not self.pool.workers.started:
                    return str(error)
            except EpisodeError as error:
                return str(error)
            else:
                return ""
            finally:
                episode.close()
        return "lost"


Jobs = Groups | Episodes
KINDS = [Groups, Episodes]


def done(jobs: Jobs, *orders: str) -> list[str]:

    async def do() -> list[str]:
        return [await jobs.do(order) for order in orders]

    return list(run(do()))


def pid_of(pool: WorkerPool) -> int:
    """The process in which the only worker of this machine runs the code."""
    (worker,) = pool.local._processes
    return int(worker._running.pid)
