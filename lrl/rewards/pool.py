"""Rewards run in processes that can be killed one by one: a reward is other people's code, and may hang or crash.

A whole group is one job, so that a job's own price does not matter. Only the answers that a job did not get done are
scored again, each alone, so that one bad answer costs only itself. With a deadline of t seconds for an answer:

- A group's job begins no answer after t seconds. If every answer keeps its deadline, it ends within 2 t. So it is
  killed after 2 t: one of its answers is over time.
- An answer alone is killed after t, and that is a timeout.

Workers are spawned, never forked: the trainer has threads, and a fork would inherit the open pipes and sockets by whose
closing other processes notice the trainer's death. The price is that a worker imports the script that was run.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pebble import ProcessExpired, ProcessPool

from lrl.rewards import worker
from lrl.rewards.base import Reward
from lrl.rewards.function import as_reward

if TYPE_CHECKING:
    from lrl.data import Prompt, Rollout

log = logging.getLogger(__name__)

_START_S = 120.0
"""Time for a worker to start: an interpreter, the imports of the script that was run, those of the rewards."""
_Answer = tuple[str, dict[str, Any]]
_COUNTS = {"error": "errors", "timeout": "timeouts", "crash": "crashes"}


class RewardPool:
    """Worker processes that score groups. Use: `start()`, `await score(...)` from one event loop, `close()`.

    Args:
        rewards: What judges an answer; their weighted sum is its reward. Functions and import paths become `Function`s.
        workers: Processes on this host.
        timeout_s: Seconds an answer may take, all rewards together.

    Raises:
        ValueError: If there is no reward, two share a name, one cannot be sent to a process, or a number is too low.
    """

    def __init__(
        self, rewards: Sequence[Reward | Callable[..., Any] | str], workers: int = 2, timeout_s: float = 10.0
    ) -> None:
        self.rewards = [as_reward(reward) for reward in rewards]
        self.workers = workers
        self.timeout_s = timeout_s
        _check(self.rewards, workers, timeout_s)
        self._pickled = pickle.dumps(self.rewards)
        self._counts: Counter[str] = Counter()
        self._pool: ProcessPool | None = None
        self._lock = threading.RLock()  # close() comes from another thread, maybe while score() replaces a lost pool
        self._in_flight: set[Future[Any]] = set()

    @property
    def counts(self) -> dict[str, int]:
        """Answers so far: `scored`, `zero` of these; and those without a reward: `errors`, `timeouts`, `crashes`."""
        return {name: self._counts[name] for name in ("scored", "zero", *_COUNTS.values())}

    def start(self) -> None:
        """Starts the workers and waits until one is ready.

        Call it on a thread that outlives the pool: Linux ends a worker with the thread that started it.

        Raises:
            RuntimeError: If a reward cannot be loaded in a worker, or the workers die while they start.
            TimeoutError: If none is ready after two minutes.
        """
        self._pool = self._pool or self._new_pool()
        try:
            self._await_ready(self._pool)
        except (RuntimeError, TimeoutError):
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers at once, whatever they are doing. May be called twice."""
        with self._lock:
            pool, self._pool = self._pool, None
            if pool is None:
                return
            pool.stop()
            pool.join()
        for future in list(self._in_flight):
            with suppress(InvalidStateError):  # done already; pebble leaves the others waiting for ever
                future.set_exception(BrokenProcessPool("the reward pool was closed"))

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Fills `reward` and `reward_parts`, or `reward_failure`, of each rollout; they are all answers to `prompt`.

        Raises:
            RuntimeError: If the pool is not started, or is closed meanwhile.
        """
        answers = [(rollout.text, _columns(prompt, rollout)) for rollout in rollouts]
        outcomes: list[worker.Outcome] = [None] * len(answers)
        if len(answers) > 1:
            together = await self._job(prompt.text, answers, 2 * self.timeout_s)
            outcomes = outcomes if isinstance(together, str) else together
        undone = [i for i, outcome in enumerate(outcomes) if outcome is None]
        alone = await asyncio.gather(*(self._alone(prompt.text, answers[i]) for i in undone))
        for i, outcome in zip(undone, alone, strict=True):
            outcomes[i] = outcome
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            self._record(rollout, outcome)

    async def _alone(self, prompt: str, answer: _Answer) -> worker.Outcome:
        outcome = await self._job(prompt, [answer], self.timeout_s)
        if isinstance(outcome, str):
            return outcome
        return outcome[0] or f"timeout: no reward after {self.timeout_s:g} s"

    async def _job(self, prompt: str, answers: list[_Answer], limit_s: float) -> list[worker.Outcome] | str:
        """Outcomes from one worker, or why it gave none. Tries again if the whole pool is lost (others' fault)."""
        job = pickle.dumps((prompt, answers))
        for _ in range(2):
            future = self._live_pool().schedule(worker.score, (job, self.timeout_s), timeout=limit_s)
            try:
                return await self._result(future)
            except TimeoutError:
                return f"timeout: no reward after {limit_s:g} s"
            except ProcessExpired as error:
                return f"crash: the reward worker ended with exit code {error.exitcode}"
            except BrokenProcessPool as error:
                log.warning("The reward workers are lost (%r).", error.__cause__ or error)
        return "crash: the reward workers were lost twice"

    async def _result(self, future: Future[Any]) -> Any:
        self._in_flight.add(future)
        # The deadline in `schedule` begins when a worker takes the job; this one is for a pool that lost the job.
        lost_s = _START_S + 2 * self.timeout_s * len(self._in_flight)
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait({waiting}, timeout=lost_s)
            if not future.done():
                self._live_pool().stop()
                raise BrokenProcessPool(f"no answer from them in {lost_s:.0f} s")
            return future.result()
        finally:
            waiting.cancel()
            self._in_flight.discard(future)

    def _record(self, rollout: Rollout, outcome: worker.Outcome) -> None:
        if isinstance(outcome, tuple):
            rollout.reward, rollout.reward_parts = outcome
            self._counts.update(scored=1, zero=int(rollout.reward == 0))
            return
        rollout.reward_failure = outcome
        count = _COUNTS[str(outcome).partition(":")[0]]
        self._counts[count] += 1
        if self._counts[count] == 1:
            log.warning("An answer got no reward. %s (Further %s are only counted.)", outcome, count)

    def _live_pool(self) -> ProcessPool:
        with self._lock:
            if self._pool is None:
                raise RuntimeError("The reward pool is not running; call RewardPool.start() before score().")
            if not self._pool.active:
                self.close()
                self._pool = self._new_pool()
            return self._pool

    def _new_pool(self) -> ProcessPool:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPool(self.workers, initializer=worker.begin, initargs=(self._pickled, os.getpid()), context=spawn)

    def _await_ready(self, pool: ProcessPool) -> None:
        try:
            pool.schedule(worker.ready).result(_START_S)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "The reward workers died while they started; their own message is above. They import the script that "
                'was run: what starts the training must stand under `if __name__ == "__main__":`.'
            ) from error
        except TimeoutError as error:
            raise TimeoutError(
                f"No reward worker was ready after {_START_S:.0f} s. They import the script that was run and the "
                f"modules of the rewards ({', '.join(reward.name for reward in self.rewards)}): see which is slow."
            ) from error


def _columns(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    """What a reward gets by name. A row's own `prompt` or `response` column would clash with the arguments."""
    row = {name: value for name, value in prompt.columns.items() if name not in ("prompt", "response")}
    return row | {"finish_reason": rollout.finish_reason, "num_tokens": len(rollout.token_ids)}


def _check(rewards: list[Reward], workers: int, timeout_s: float) -> None:
    names = Counter(reward.name for reward in rewards)
    if not names:
        raise ValueError("rewards is empty; give at least one.")
    if twice := [name for name, times in names.items() if times > 1]:
        raise ValueError(f"rewards has more than one named {twice[0]!r}; give one of them another `name`.")
    if workers < 1 or timeout_s <= 0:
        raise ValueError(f"workers={workers}, timeout_s={timeout_s}: workers must be at least 1, timeout_s above 0.")
    for reward in rewards:
        try:
            pickle.dumps(reward)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"rewards has {reward.name!r}, which cannot be sent to a reward worker: {error}. Define it at the top "
                f"level of a module (no lambda, no function in a function), without open files or connections."
            ) from error
