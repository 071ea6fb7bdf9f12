"""Rewards run in processes that can be killed one by one: a reward is other people's code, and may hang or crash.

A whole group is one job, so that a job's own price does not matter. What it did not get done is scored alone, each
answer for itself, so that a bad one costs only itself. An answer that fails is tried once more, alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from lrl.rewards.base import Reward
from lrl.rewards.failure_stats import KINDS, FailureStats
from lrl.rewards.function import as_reward
from lrl.rewards.job_state import Outcome, Scored
from lrl.rewards.processes import Answer, Processes
from lrl.rewards.sendable import check_main, check_sendable
from lrl.runtime.config_errors import ConfigError, above, at_least, fault

if TYPE_CHECKING:
    from lrl.types import Prompt, Rollout

log = logging.getLogger(__name__)

_REFERENCES = ("answer", "solution")
"""Columns whose text is a plausible response."""
_LONGEST_SHOWN = 80


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
        _check_patience(self.rewards, timeout_s)
        self._processes = Processes(self.rewards, workers, timeout_s, memory_gib)
        self._failure_stats = FailureStats(max_failures)
        self._parts: set[str] | None = None  # of the first answer

    @property
    def counts(self) -> dict[str, int]:
        """Since the start: answers that were `scored`, `zero` of these, `gave_up` of these (a verifier gave up on them,
        see `GaveUp`), `retried`; without a reward by kind (`lrl.rewards.failure_stats.KINDS`); and workers that were
        `replaced`."""
        return {**self._failure_stats.counts, "replaced": self._processes.replaced}

    def like(self, rewards: Sequence[Reward | Callable[..., Any] | str], workers: int) -> RewardPool:
        """Another pool with the same limits, for other rewards."""
        limits = self._processes
        return RewardPool(rewards, workers, limits.timeout_s, limits.memory_gib, self._failure_stats.max_failures)

    def start(self, first: Prompt | None = None) -> None:
        """Starts the workers, waits until one is ready, and has it judge a made-up response to a prompt.

        Call it on a thread that outlives the pool: Linux ends a worker with the thread that started it.

        Args:
            first: The prompt, with its row's columns. The response is the text of the column `answer`, else of
                `solution`, else `0`. None for no trial.

        Raises:
            RuntimeError: If the workers die while they start.
            TimeoutError: If none is ready after two minutes.
            ValueError: If a reward cannot be loaded in a worker, or the response got no reward, also when tried again.
                (With `max_failures` 1 the latter is only logged.)
        """
        self._processes.start()
        if first is not None:
            self._try_on(first)

    def close(self) -> None:
        """Ends the workers at once, whatever they are doing. May be called twice."""
        self._processes.close()

    def _try_on(self, prompt: Prompt) -> None:
        response = _made_up_response(prompt.columns)
        answer = response, _columns(prompt, "stop", max(1, len(response.split())))
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop, as in a notebook
            outcome = thread.submit(lambda: asyncio.run(self._tried(prompt.text, answer))).result()
        if not isinstance(outcome, str):
            return
        self.close()  # a worker that was lost may have a successor that ends with the thread above
        text = (
            f"The rewards were tried on the response {response[:_LONGEST_SHOWN]!r} to prompt {prompt.id}, before any "
            f"answer is written, and failed: {outcome}. The row's columns: {', '.join(prompt.columns) or 'none'}. "
            f"{KINDS[outcome.partition(':')[0]]} A text that it cannot read is worth 0.0, and not an error."
        )
        if self._failure_stats.max_failures < 1:
            fault(text)
        log.warning("%s The run goes on, as data.max_reward_failures is 1.", text)
        self._processes.replaced = 0
        self._processes.start()

    async def _tried(self, prompt: str, answer: Answer) -> Outcome:
        (outcome,) = await self._processes.outcomes(prompt, [answer])
        if isinstance(outcome, str):
            (outcome,) = await self._processes.outcomes(prompt, [answer])
        return outcome

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Fills `reward` and `reward_parts`, or `reward_failure`, of each rollout; they are all answers to `prompt`.

        Raises:
            RuntimeError: If the pool is not started, or is closed meanwhile.
            RewardFailuresError: If more than `max_failures` of the last answers got no reward.
        """
        answers = [
            (rollout.text, _columns(prompt, rollout.finish_reason, len(rollout.token_ids))) for rollout in rollouts
        ]
        together: list[Outcome] = [None] * len(answers)
        if len(answers) > 1:
            together = [self._judged(outcome) for outcome in await self._processes.outcomes(prompt.text, answers)]
        settling = (self._settled(prompt.text, *pair) for pair in zip(answers, together, strict=True))
        for rollout, outcome in zip(rollouts, await asyncio.gather(*settling), strict=True):
            self._record(prompt, rollout, outcome)
        self._failure_stats.check()

    async def _settled(self, prompt: str, answer: Answer, outcome: Outcome) -> Outcome:
        """An answer's last outcome: a reward, or the failure of its second try."""
        if outcome is None:
            outcome = await self._alone(prompt, answer)
        if isinstance(outcome, str):
            self._failure_stats.counts["retried"] += 1
            outcome = await self._alone(prompt, answer)
        return outcome

    async def _alone(self, prompt: str, answer: Answer) -> Outcome:
        (outcome,) = await self._processes.outcomes(prompt, [answer])
        return self._judged(outcome)

    def _judged(self, outcome: Outcome) -> Outcome:
        """Refuses other parts than those of the run's first answer: one that is missing would count as 0."""
        if not isinstance(outcome, Scored):
            return outcome
        parts = set(outcome.parts)
        self._parts = self._parts or parts
        if parts == self._parts:
            return outcome
        return (
            f"wrong_shape: the parts are {sorted(parts)}, those of the first answer {sorted(self._parts)}; a reward "
            "gives the same ones for every answer, 0.0 for one that does not apply"
        )

    def _record(self, prompt: Prompt, rollout: Rollout, outcome: Outcome) -> None:
        if isinstance(outcome, Scored):
            rollout.reward, rollout.reward_parts = outcome.reward, outcome.parts
            self._failure_stats.reward(rollout.reward)
            if outcome.gave_up:
                self._failure_stats.gave_up(prompt.id, rollout.text, outcome.gave_up)
        else:
            rollout.reward_failure = outcome
            self._failure_stats.failure(prompt.id, rollout.text, str(outcome))


def _made_up_response(columns: Mapping[str, Any]) -> str:
    texts = [str(columns[name]) for name in _REFERENCES if isinstance(columns.get(name), str | int | float)]
    return next((text for text in texts if text), "0")


def _columns(prompt: Prompt, finish_reason: str | None, num_tokens: int) -> dict[str, Any]:
    """What a reward gets by name. A row's own `prompt` or `response` column would clash with the arguments."""
    row = {name: value for name, value in prompt.columns.items() if name not in ("prompt", "response")}
    return row | {"finish_reason": finish_reason, "num_tokens": num_tokens}


def _check_limits(workers: int, timeout_s: float, memory_gib: float | None, max_failures: float) -> None:
    at_least(1, "data", reward_workers=workers)
    above(0, "data", reward_timeout_s=timeout_s)
    if memory_gib is not None and not memory_gib > 0:
        fault(f"data.reward_memory_gib is {memory_gib}; it must be above 0, or null for no limit.")
    if not 0 < max_failures <= 1:
        fault(f"data.max_reward_failures is {max_failures}; it must be above 0 and at most 1 (never stop).")


def _check_patience(rewards: list[Reward], timeout_s: float) -> None:
    """A verifier gives up before its worker is killed, or its wrong answers would have no reward."""
    patience_s = sum(reward.give_up_s for reward in rewards)
    if 0 < timeout_s < 2 * patience_s:
        names = ", ".join(repr(reward.name) for reward in rewards if reward.give_up_s)
        fault(
            f"data.reward_timeout_s is {timeout_s:g}, and rewards give up on an answer only after {patience_s:g} s "
            f"({names}): set it to at least {2 * patience_s:g}, or lower their give_up_s."
        )


def _check_rewards(rewards: list[Reward]) -> None:
    names = Counter(reward.name for reward in rewards)
    if not names:
        raise ConfigError("rewards is empty; give at least one.")
    if twice := [name for name, times in names.items() if times > 1]:
        raise ConfigError(f"rewards has more than one named {twice[0]!r}; give one of them another `name`.")
    check_main()
    for reward in rewards:
        check_sendable(reward)
