"""Rewards run in processes that can be killed one by one: a reward is other people's code, and may hang or crash.

A whole group is one job, so that a job's own price does not matter. What it did not get done is scored alone, each
answer for itself, so that a bad one costs only itself. An answer that fails is tried once more, alone.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lrl.faults import above, at_least, fault
from lrl.rewards.base import Reward
from lrl.rewards.function import as_reward
from lrl.rewards.place import Outcome
from lrl.rewards.processes import Answer, Processes
from lrl.rewards.tally import Tally

if TYPE_CHECKING:
    from lrl.data import Prompt, Rollout


class RewardPool:
    """Worker processes that score groups. Use: `start()`, `await score(...)` from one event loop, `close()`.

    Args:
        rewards: What judges an answer; their weighted sum is its reward. Functions and import paths become `Function`s.
        workers: Processes on this host.
        timeout_s: Seconds an answer may take, all rewards together.
        memory_gib: What scoring may allocate in a worker beyond what it holds once the rewards are loaded, in GiB; None
            for no limit. Linux only.
        max_failures: Largest share of answers that may get no reward, in (0, 1], over the last few hundred; 1 allows
            any.

    Raises:
        ValueError: If there is no reward, two share a name, one cannot be sent to a process, or a number is out of
            range.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | Callable[..., Any] | str],
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_gib: float | None = 4.0,
        max_failures: float = 0.1,
    ) -> None:
        self.rewards = [as_reward(reward) for reward in rewards]
        _check_rewards(self.rewards)
        _check_limits(workers, timeout_s, memory_gib, max_failures)
        self._processes = Processes(self.rewards, workers, timeout_s, memory_gib)
        self._tally = Tally(max_failures)
        self._parts: set[str] | None = None  # of the first answer

    @property
    def counts(self) -> dict[str, int]:
        """Since the start: answers that were `scored`, `zero` of these, `retried`; without a reward by kind
        (`lrl.rewards.tally.KINDS`); and workers that were `replaced`."""
        return {**self._tally.counts, "replaced": self._processes.replaced}

    def like(self, rewards: Sequence[Reward | Callable[..., Any] | str], workers: int) -> RewardPool:
        """Another pool with the same limits, for other rewards."""
        limits = self._processes
        return RewardPool(rewards, workers, limits.timeout_s, limits.memory_gib, self._tally.max_failures)

    def start(self) -> None:
        """Starts the workers and waits until one is ready.

        Call it on a thread that outlives the pool: Linux ends a worker with the thread that started it.

        Raises:
            RuntimeError: If a reward cannot be loaded in a worker, or the workers die while they start.
            TimeoutError: If none is ready after two minutes.
        """
        self._processes.start()

    def close(self) -> None:
        """Ends the workers at once, whatever they are doing. May be called twice."""
        self._processes.close()

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Fills `reward` and `reward_parts`, or `reward_failure`, of each rollout; they are all answers to `prompt`.

        Raises:
            RuntimeError: If the pool is not started, or is closed meanwhile.
            RewardFailuresError: If more than `max_failures` of the last answers got no reward.
        """
        answers = [(rollout.text, _columns(prompt, rollout)) for rollout in rollouts]
        together: list[Outcome] = [None] * len(answers)
        if len(answers) > 1:
            together = [self._judged(outcome) for outcome in await self._processes.outcomes(prompt.text, answers)]
        settling = (self._settled(prompt.text, *pair) for pair in zip(answers, together, strict=True))
        for rollout, outcome in zip(rollouts, await asyncio.gather(*settling), strict=True):
            self._record(prompt, rollout, outcome)
        self._tally.check()

    async def _settled(self, prompt: str, answer: Answer, outcome: Outcome) -> Outcome:
        """An answer's last outcome: a reward, or the failure of its second try."""
        if outcome is None:
            outcome = await self._alone(prompt, answer)
        if isinstance(outcome, str):
            self._tally.counts["retried"] += 1
            outcome = await self._alone(prompt, answer)
        return outcome

    async def _alone(self, prompt: str, answer: Answer) -> Outcome:
        (outcome,) = await self._processes.outcomes(prompt, [answer])
        return self._judged(outcome)

    def _judged(self, outcome: Outcome) -> Outcome:
        """Refuses other parts than those of the run's first answer: one that is missing would count as 0."""
        if not isinstance(outcome, tuple):
            return outcome
        parts = set(outcome[1])
        self._parts = self._parts or parts
        if parts == self._parts:
            return outcome
        return (
            f"wrong_shape: the parts are {sorted(parts)}, those of the first answer {sorted(self._parts)}; a reward "
            "gives the same ones for every answer, 0.0 for one that does not apply"
        )

    def _record(self, prompt: Prompt, rollout: Rollout, outcome: Outcome) -> None:
        if isinstance(outcome, tuple):
            rollout.reward, rollout.reward_parts = outcome
            self._tally.reward(rollout.reward)
        else:
            rollout.reward_failure = outcome
            self._tally.failure(prompt.id, rollout.text, str(outcome))


def _columns(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    """What a reward gets by name. A row's own `prompt` or `response` column would clash with the arguments."""
    row = {name: value for name, value in prompt.columns.items() if name not in ("prompt", "response")}
    return row | {"finish_reason": rollout.finish_reason, "num_tokens": len(rollout.token_ids)}


def _check_limits(workers: int, timeout_s: float, memory_gib: float | None, max_failures: float) -> None:
    at_least(1, "data", reward_workers=workers)
    above(0, "data", reward_timeout_s=timeout_s)
    if memory_gib is not None and not memory_gib > 0:
        fault(f"data.reward_memory_gib is {memory_gib}; it must be above 0, or null for no limit.")
    if not 0 < max_failures <= 1:
        fault(f"data.max_reward_failures is {max_failures}; it must be above 0 and at most 1 (never stop).")


def _check_rewards(rewards: list[Reward]) -> None:
    names = Counter(reward.name for reward in rewards)
    if not names:
        raise ValueError("rewards is empty; give at least one.")
    if twice := [name for name, times in names.items() if times > 1]:
        raise ValueError(f"rewards has more than one named {twice[0]!r}; give one of them another `name`.")
    for reward in rewards:
        try:
            pickle.dumps(reward)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"rewards has {reward.name!r}, which cannot be sent to a reward worker: {error}. Define it at the top "
                f"level of a module (no lambda, no function in a function), without open files or connections."
            ) from error
