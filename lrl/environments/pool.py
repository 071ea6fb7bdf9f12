"""The episodes of a run, which workers play."""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from lrl.environments.base import Environment, Written
from lrl.environments.play import Player, Reply, check_opening, finite, readable
from lrl.errors import BadAnswer, CallFailed, ConfigError, EpisodeError, NoEnvironments
from lrl.rewards.pool import EPISODE_KINDS
from lrl.system.event_loop import LoopThread
from lrl.workers.pool import WorkerJob, WorkerPool, Workers
from lrl.workers.process import WorkerSpec
from lrl.workers.worker import START_TIMEOUT_S, pickled

if TYPE_CHECKING:
    from lrl.types import Prompt

log = logging.getLogger(__name__)

OUTAGE_S = 900.0
"""Seconds that episodes wait for a member if nothing else plays."""
LOG_EVERY_S = 60.0
_POLL_S = 0.25
_LONGEST_SHOWN = 80


class EnvironmentPool:
    """Plays the episodes of a run in `workers` processes on this machine (0 if members alone play).
    Use: `start()`, episodes, `close()`. Raises ConfigError if the environment cannot be sent."""

    def __init__(
        self,
        environment: Environment,
        workers: int,
        *,
        turn_timeout_s: float,
        memory_gib: float | None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        what = f"data.environment is {type(environment).__name__}"
        sent = pickled(Player(environment, turn_timeout_s), what)
        self.counts: Counter[str] = Counter()
        """Episodes that a resume or a loss has had `replayed`, or `restarted`."""
        self.answered_by: Counter[str] = Counter()
        """Turns with a reply, by the machine that gave it."""
        spec = WorkerSpec(
            "environment",
            sent,
            timeout_s=turn_timeout_s,
            memory_gib=memory_gib,
            start_timeout_s=start_timeout_s,
        )
        self.workers = WorkerPool(spec, workers)
        self._logged_at = 0.0

    def open(self, prompt: Prompt) -> EpisodeElsewhere:
        return EpisodeElsewhere(self, prompt)

    async def job(self) -> WorkerJob:
        """Returns an episode of the least busy machine; waits until there is one. Raises
        NoEnvironments if there was none for `OUTAGE_S`."""
        began = time.monotonic()
        while (job := self.workers.job()) is None:
            now = time.monotonic()
            lost = self.workers.members.last_loss
            cause = f" The last one was lost because: {lost}." if lost else ""
            outage = (
                f"No environment has played for {now - began:.0f} s: data.environment_workers is "
                f"0, and no member of kind worker serves.{cause}"
            )
            if now - began > OUTAGE_S:
                raise NoEnvironments(outage)
            if now - self._logged_at > LOG_EVERY_S:
                self._logged_at = now
                log.warning("%s Episodes wait for one, for %g s.", outage, OUTAGE_S)
            await asyncio.sleep(_POLL_S)
        return job

    def start(
        self,
        loop: LoopThread,
        prompt: Prompt | None = None,
        turn: Written = Written("", []),  # noqa: B008 (it cannot change)
        check: Callable[[Reply, Reply], Any] = lambda opening, reply: None,
    ) -> None:
        """Starts the processes. With a `prompt` plays the beginning of an episode, up to the reply
        to `turn`, on this machine, if it has any, and on each member before it gets episodes;
        `check` raises EpisodeError for what the policy cannot read. Episodes are played on `loop`;
        call `close` also after its errors.

        Raises:
            ConfigError: The environment cannot be loaded, the episode has failed, or a process has
                ended while it started.
            TimeoutError: No process was ready in time.
        """
        self.workers.start(loop)
        if prompt is not None:
            self.workers.try_out(loop, partial(self._try_out, prompt, turn, check))

    async def _try_out(
        self, prompt: Prompt, turn: Written, check: Callable[[Reply, Reply], Any], machine: Workers
    ) -> None:
        job = self.workers.job_on(machine)
        try:
            opening = await _begin(job, prompt)
            check_opening(opening)
            check(opening, await _reply(job.turn(turn._asdict(), read_reply)))
        except EpisodeError as error:
            raise ConfigError(
                f"data.environment was tried with prompt {prompt.id} and the turn "
                f"{turn.text[:_LONGEST_SHOWN]!r}, before any is sampled, and failed: {error}. "
                f"The row's columns: {', '.join(prompt.columns) or 'none'}. "
                f"{EPISODE_KINDS[error.kind]}"
            ) from None
        finally:
            job.end()

    def close(self) -> None:
        """Kills all processes, whatever they are doing. May be called twice."""
        self.workers.close()


class EpisodeElsewhere:
    """An episode that another process plays; see `lrl.rollouts.episodes.episode.Conversation`."""

    def __init__(self, pool: EnvironmentPool, prompt: Prompt) -> None:
        self._pool = pool
        self._prompt = prompt
        self._job: WorkerJob | None = None

    async def begin(self) -> Reply:
        self._job = await self._pool.job()
        return await _begin(self._job, self._prompt)

    async def reply(self, turn: Written) -> Reply:
        assert self._job is not None, "it has begun"
        reply = await _reply(self._job.turn(turn._asdict(), read_reply))
        self._pool.answered_by[self._job.machine.name] += 1
        return reply

    def close(self) -> None:
        """Ends it, if it has not ended."""
        if self._job is not None:
            self._job.end()


async def _begin(job: WorkerJob, prompt: Prompt) -> Reply:
    # Columns of these names would clash with the arguments.
    columns = {
        name: value for name, value in prompt.columns.items() if name not in ("prompt", "policy")
    }
    return await _reply(job.begin(pickle.dumps((prompt.text, columns)), read_reply))


async def _reply(call: Awaitable[Reply]) -> Reply:
    """Returns the answer of a call; raises EpisodeError if the episode has failed."""
    try:
        return await call
    except CallFailed as error:
        kind = "tool_timeout" if error.kind == "timeout" else "environment_error"
        raise EpisodeError(kind, error.message) from None


def read_reply(answer: Any) -> Reply:
    """Returns the reply in the JSON of a worker; raises BadAnswer for what is none."""
    match answer:
        case {
            "observation": observation,
            "done": bool(done),
            "reward": reward,
            "tools": [*tools],
            "after": int() | None as after,
        }:
            with suppress(TypeError):
                seen = readable(observation)
                return Reply(seen, done, finite(reward), tuple(tools), after=after)
    raise BadAnswer(f"{str(answer)[:80]!r} is no reply")
