"""The reward pool: has workers score responses, and fills in their rewards.

A whole group is one job, so the overhead of a job does not matter. Responses that the job did not
reach are scored alone, so a bad one costs only itself. A response that fails is tried once more,
alone.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lrl.errors import CallFailed, ConfigError, WorkerLost, WorkersClosed, at_least
from lrl.rewards.base import OneReward, Reward, as_reward, trial_response
from lrl.rewards.failure_stats import KINDS, FailureStats
from lrl.rewards.scoring import Outcome, Response, Scored, Scoring, read_outcomes
from lrl.rewards.simple import TurnRewards
from lrl.system.event_loop import run_apart
from lrl.workers.pool import WorkerJob, WorkerPool, Workers
from lrl.workers.process import WorkerSpec
from lrl.workers.worker import START_TIMEOUT_S, pickled

if TYPE_CHECKING:
    from lrl.types import Prompt, Rollout

log = logging.getLogger(__name__)

_LOST_MEMBERS = 3
"""Workers that a job may lose before this machine scores it, whose workers are always there."""
_ATTEMPTS = _LOST_MEMBERS + 5
_USUAL_TIMEOUT_S = 10.0


class RewardPool:
    """Worker processes that score groups. Use: `start()`, `await score(...)` from one event loop,
    `close()`.

    Args:
        rewards: The rewards; their weighted sum is trained on. A function or an import path becomes
            a `Function`.
        workers: Processes on this machine.
        timeout_s: Seconds for one response, all rewards together; None for 10, or as many as their
            own limits need.
        memory_gib: GiB that scoring may allocate in a worker beyond what it holds once the rewards
            are loaded; None for no limit.
        max_failures: Largest share of responses that may get no reward, in (0, 1], over the last
            few hundred; 1 allows any.
        start_timeout_s: Most seconds for the start of a worker.

    Raises:
        ValueError: There is no reward, two share a name, one cannot be sent to a process, or a
            number is out of range.
    """

    def __init__(
        self,
        rewards: Sequence[OneReward],
        workers: int = 2,
        timeout_s: float | None = None,
        memory_gib: float | None = 4.0,
        max_failures: float = 0.1,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.rewards = [as_reward(reward) for reward in rewards]
        _check_rewards(self.rewards)
        at_least(1, "data", reward_workers=workers)
        if not 0 < max_failures <= 1:
            raise ConfigError(
                f"data.max_reward_failures is {max_failures}; it is a share, above 0 and up to 1."
            )
        self._limits: dict[str, Any] = {
            "timeout_s": timeout_s,
            "memory_gib": memory_gib,
            "max_failures": max_failures,
            "start_timeout_s": start_timeout_s,
        }
        spec = WorkerSpec(
            "reward",
            b"",  # at the start
            timeout_s=_longest(self.rewards, timeout_s),
            memory_gib=memory_gib,
            start_timeout_s=start_timeout_s,
        )
        self.workers = WorkerPool(spec, workers)
        self.moved = 0
        """Responses that were given to others, since their machine was lost."""
        self.scored_by: Counter[str] = Counter()
        """Responses with a reward, by the machine that scored them."""
        self._failure_stats = FailureStats(max_failures)
        self._parts: set[str] | None = None  # of the first response
        self._tells_messages = any(reward.reads_messages for reward in self.rewards)
        self._turn_weight = sum(
            reward.weight for reward in self.rewards if isinstance(reward, TurnRewards)
        )

    @property
    def counts(self) -> dict[str, int]:
        """Counts since the start: responses `scored`, `zero` of these, `gave_up` of these (see
        `GaveUp`), `retried`; responses without a reward by kind
        (`lrl.rewards.failure_stats.KINDS`); workers `replaced` on all machines; and responses
        `moved` from a machine that was lost."""
        own = self._failure_stats.counts
        return {**own, "replaced": self.workers.replaced, "moved": self.moved}

    def like(self, rewards: Sequence[OneReward], workers: int) -> RewardPool:
        """Returns another pool with the same limits, for other rewards, for this machine alone."""
        return RewardPool(rewards, workers, **self._limits)

    def start(self, first: Prompt | None = None) -> None:
        """Starts the workers, waits until one is ready, and scores a trial response.

        Args:
            first: Prompt of the trial, with the columns of its row. The response is the text of the
                column `answer`, else of `solution`, else `0`. None for no trial.

        Raises:
            ConfigError: A reward cannot be loaded in a worker, the workers died while they started,
                or the response got no reward, also when tried again. (With `max_failures` 1 the
                latter is only logged.)
            TimeoutError: No worker was ready within `start_timeout_s`.
        """
        # Not earlier: a reward may have been told where its server is.
        code = pickle.dumps(Scoring(self.rewards, self.workers.spec.timeout_s))
        self.workers.start(replace(self.workers.spec, code=code))
        if first is None:
            return
        trial = partial(self._try_out, first)
        try:
            run_apart(lambda: trial(self.workers.local))
        except ConfigError as error:
            if self._failure_stats.max_failures < 1:
                self.close()
                raise
            log.warning("%s The run continues, as data.max_reward_failures is 1.", error)
        else:
            self.workers.trial = trial  # other machines must score what this one has

    def close(self) -> None:
        """Kills the workers, whatever they are doing. May be called twice."""
        self.workers.close()

    async def _try_out(self, prompt: Prompt, machine: Workers) -> None:
        text = trial_response(prompt.columns)
        response = text, self._columns(prompt, "stop", max(1, len(text.split())))
        for _ in range(2):
            job = self.workers.job_on(machine)
            (outcome,) = await self._outcomes_on(job, prompt.text, [response])
            if not isinstance(outcome, str):
                return
        raise ConfigError(
            f"The rewards were tried on the response {text[:80]!r} to prompt "
            f"{prompt.id}, before any response is sampled, and failed: {outcome}. The row's "
            f"columns: {', '.join(prompt.columns) or 'none'}. {KINDS[str(outcome).partition(':')[0]]}"
        )

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Fills `reward` and `reward_parts`, or `reward_failure`, of rollouts of one prompt; one
        that has a failure already is only counted.

        Raises:
            RuntimeError: The pool is not started, or is closed meanwhile.
            RewardFailuresError: More than `max_failures` of the last responses got no reward.
        """
        played = [rollout for rollout in rollouts if rollout.reward_failure is None]
        responses = []
        for each in played:
            text = each.text if each.judged is None else each.judged
            facts = (each.finish_reason, each.num_tokens, each.turn_rewards)
            responses.append((text, self._columns(prompt, *facts)))
        first: list[Outcome] = [None] * len(responses)
        if len(responses) > 1:
            first = await self._outcomes(prompt.text, responses)
        last = map(partial(self._last_outcome, prompt.text), responses, first)
        for rollout, outcome in zip(played, await asyncio.gather(*last), strict=True):
            if isinstance(outcome, Scored):
                rollout.reward = outcome.reward
                rollout.reward_parts = outcome.parts
                rollout.turn_weight = self._turn_weight
                self._failure_stats.reward(rollout.reward)
                if outcome.gave_up:
                    self._failure_stats.gave_up(prompt.id, rollout.text, outcome.gave_up)
            else:
                rollout.reward_failure = str(outcome)
        for rollout in rollouts:
            if rollout.reward_failure is not None:
                self._failure_stats.failure(prompt.id, rollout.text, rollout.reward_failure)
        self._failure_stats.check()

    def _columns(
        self,
        prompt: Prompt,
        finish_reason: str,
        num_tokens: int,
        turn_rewards: Sequence[float] = (),
    ) -> dict[str, Any]:
        """Returns the keyword arguments of a reward."""
        found = {
            **prompt.columns,
            "finish_reason": finish_reason,
            "num_tokens": num_tokens,
            "turn_rewards": list(turn_rewards),
        }
        if self._tells_messages:
            found["prompt_messages"] = prompt.chat and list(prompt.chat.messages)
        # A row's own would clash with the arguments.
        return {name: found[name] for name in found if name not in ("prompt", "response")}

    async def _last_outcome(self, prompt: str, response: Response, outcome: Outcome) -> Outcome:
        """Returns the outcome, or that of a second attempt if the first gave no reward."""
        if outcome is None:
            (outcome,) = await self._outcomes(prompt, [response])
        if isinstance(outcome, str):
            self._failure_stats.counts["retried"] += 1
            (outcome,) = await self._outcomes(prompt, [response])
        return outcome

    async def _outcomes(self, prompt: str, responses: Sequence[Response]) -> list[Outcome]:
        """Returns the outcomes of a group, from the least busy machine; what is lost there goes to
        others."""
        for attempt in range(_ATTEMPTS):
            job = self.workers.job(here=attempt >= _LOST_MEMBERS)
            assert job is not None, "this machine has workers"
            try:
                found = await self._outcomes_on(job, prompt, responses)
            except WorkersClosed:
                raise
            except WorkerLost:
                self.moved += len(responses) if job.where else 0
            else:
                scored = sum(isinstance(outcome, Scored) for outcome in found)
                self.scored_by[job.machine.name] += scored
                return list(map(self._checked, found))
        return [f"crash: the worker was lost {_ATTEMPTS} times in a row"] * len(responses)

    async def _outcomes_on(
        self, job: WorkerJob, prompt: str, responses: Sequence[Response]
    ) -> list[Outcome]:
        """Returns the outcomes of a group that a machine gets; None for responses that it did not
        reach. Raises WorkerLost."""
        count = len(responses)
        packed = pickle.dumps((prompt, list(responses)))
        try:
            outcomes = await job.begin(packed, partial(read_outcomes, count=count))
        except CallFailed as error:
            # It has ended the worker: the failure is that of the response whose code ran.
            known = error.part is not None and error.part < len(self.rewards)
            name = f"{self.rewards[error.part or 0].name}: " if known else ""
            failed = 0 if count == 1 else error.item
            reason = f"{error.kind}: {name}{error.message}"
            return [reason if item == failed else None for item in range(count)]
        finally:
            job.end()
        return [f"{each}{job.where}" if isinstance(each, str) else each for each in outcomes]

    def _checked(self, outcome: Outcome) -> Outcome:
        """Refuses parts with other names than the first response of the run had: a missing part
        would count as 0."""
        if not isinstance(outcome, Scored):
            return outcome
        self._parts = self._parts or set(outcome.parts)
        if outcome.parts.keys() == self._parts:
            return outcome
        return (
            f"wrong_shape: the parts are {sorted(outcome.parts)}, those of the first response "
            f"{sorted(self._parts)}; give 0.0 for one that does not apply"
        )


def _longest(rewards: list[Reward], timeout_s: float | None) -> float:
    """Returns the seconds for a response. A reward's worker must not be killed before it gives up
    or raises by itself: a wrong response would have no reward, and an error would not say why."""
    give_up_s = sum(reward.give_up_s for reward in rewards)
    deadline_s = sum(reward.deadline_s for reward in rewards)
    needed = max(2 * give_up_s, 1.25 * deadline_s)
    if timeout_s is None:
        return max(_USUAL_TIMEOUT_S, needed)
    if 0 < timeout_s < 2 * give_up_s or 0 < timeout_s <= deadline_s:
        raise ConfigError(
            f"data.reward_timeout_s is {timeout_s:g}, and rewards end a response by themselves "
            f"only after {max(give_up_s, deadline_s):g} s: leave it out, or set it to at least "
            f"{needed:g}."
        )
    return timeout_s


def _check_rewards(rewards: list[Reward]) -> None:
    """Refuses rewards that no worker could load, or whose names do not tell them apart."""
    if not rewards:
        raise ConfigError(
            "rewards is empty; give at least one. Without any only an environment has rewards."
        )
    names = [reward.name for reward in rewards]
    for reward in rewards:
        if names.count(reward.name) > 1:
            raise ConfigError(
                f"rewards has more than one named {reward.name!r}; give one another `name`."
            )
        pickled(reward, f"rewards has {reward.name!r}")
