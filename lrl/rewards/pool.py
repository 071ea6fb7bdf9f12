"""The reward pool: has workers score responses, and ends the run if too many get no reward.

A group is one job. Responses that it did not reach are scored alone, so a bad one costs only
itself; one that fails is tried once more, alone.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lrl.errors import (
    BadAnswer,
    CallFailed,
    ConfigError,
    RewardFailuresError,
    WorkerLost,
    WorkersClosed,
    at_least,
)
from lrl.rewards.base import OneReward, Reward, TurnRewards, as_list, trial_response
from lrl.rewards.scoring import Outcome, Response, Scored, Scoring
from lrl.system.event_loop import LoopThread
from lrl.workers.pool import WorkerJob, WorkerPool, Workers
from lrl.workers.process import WorkerSpec
from lrl.workers.worker import START_TIMEOUT_S, pickled

if TYPE_CHECKING:
    from lrl.types import Prompt, Rollout

log = logging.getLogger(__name__)

KINDS = {
    "exception": "Fix the reward: a text that it cannot read is worth 0.0, not an exception.",
    "crash": "Fix the reward; if SIGKILL ended its worker, lower data.reward_workers.",
    "timeout": "Fix the reward if it never ends; else raise data.reward_timeout_s.",
    "memory": "Fix the reward, or raise data.reward_memory_gib.",
    "nan": "Fix the reward: it must return a finite number of moderate size.",
    "wrong_type": "Fix the reward: it must return a float, or a dict of floats.",
    "wrong_shape": "Fix the reward: one number, or a dict with the same parts for every response.",
    "judge_refused": "Correct the settings of the judge.",
    "judge_failed": "See that the judge answers; raise Judge.timeout_s and deadline_s if slow.",
    "judge_no_score": "Take another judge: each answer must be the JSON that is asked for.",
    "reward_model_refused": "Correct the settings of the reward model.",
    "reward_model_failed": "See that the server of the reward model answers.",
}
"""Why a response has no reward, and the remedy; see docs/rewards.md."""
EPISODE_KINDS = {
    "tool_timeout": "Fix the environment if it never answers; else raise data.turn_timeout_s.",
    "environment_error": "Report problems to the policy as an observation, not as an exception.",
    "environment_lost": "See in the log why the processes of the environment end.",
    "episode_timeout": "Raise data.episode_timeout_s, or lower data.max_turns.",
}
"""Why an episode has failed, and the remedy; see docs/environments.md."""

WINDOW = 256  # latest responses, of which a share may fail
_LOST_MEMBERS = 3  # that a job may lose before this machine scores it
_ATTEMPTS = _LOST_MEMBERS + 5
_USUAL_TIMEOUT_S = 10.0


class RewardPool:
    """Worker processes that score groups, with the settings of `lrl.RolloutDataModule`. Await
    `score` on the loop of `start`, until `close`."""

    def __init__(
        self,
        rewards: Sequence[OneReward],
        workers: int = 2,
        timeout_s: float | None = None,
        memory_gib: float | None = 4.0,
        max_failures: float = 0.1,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.rewards = as_list(rewards)
        _check_rewards(self.rewards)
        at_least(1, "data", reward_workers=workers)
        if not 0 < max_failures <= 1:
            raise ConfigError(
                f"data.max_reward_failures is {max_failures}; it is a share, above 0 and up to 1."
            )
        self._limits = (timeout_s, memory_gib, max_failures, start_timeout_s)
        limits = (_longest(self.rewards, timeout_s), memory_gib, start_timeout_s)
        self.workers = WorkerPool(WorkerSpec("reward", b"", *limits), workers)
        self.moved = 0  # responses given to others, since their machine was lost
        self.scored_by: Counter[str] = Counter()  # responses with a reward, by machine
        self._failure_stats = FailureStats(max_failures)
        self._parts: set[str] | None = None  # of the first response
        self._turn_weight = sum(
            reward.weight for reward in self.rewards if isinstance(reward, TurnRewards)
        )

    @property
    def counts(self) -> dict[str, int]:
        """Responses since the start that were `scored`, `zero`, `gave_up` (both of the scored),
        `retried` or `moved`, or failed, by kind; and workers `replaced`, on all machines."""
        own = self._failure_stats.counts
        return {**own, "replaced": self.workers.replaced, "moved": self.moved}

    def like(self, rewards: Sequence[OneReward], workers: int) -> RewardPool:
        """Returns another pool with the same limits, for other rewards, for this machine alone."""
        return RewardPool(rewards, workers, *self._limits)

    def start(self, loop: LoopThread, first: Prompt | None = None) -> None:
        """Starts the workers, waits until one is ready, and scores a trial response to `first`: its
        right answer, or `0`. Call `close` also after its errors.

        Raises:
            ConfigError: A reward cannot be loaded in a worker, the workers died while they started,
                or the response got no reward, twice (with `max_failures` 1 that is only logged).
            TimeoutError: No worker was ready within `start_timeout_s`.
        """
        # Not earlier: a script may change its rewards until the run begins.
        code = pickle.dumps(Scoring(self.rewards, self.workers.spec.timeout_s))
        self.workers.start(loop, replace(self.workers.spec, code=code))
        if first is None:
            return
        try:
            self.workers.try_out(loop, partial(self._try_out, first))
        except ConfigError as error:
            if self._failure_stats.max_failures < 1:
                raise
            log.warning("%s The run continues, as data.max_reward_failures is 1.", error)

    def close(self) -> None:
        """Kills the workers, whatever they are doing. May be called twice."""
        self.workers.close()

    async def _try_out(self, prompt: Prompt, machine: Workers) -> None:
        text = trial_response(prompt.columns)
        facts = {"finish_reason": "stop", "num_tokens": max(1, len(text.split()))}
        response = text, self._columns(prompt, **facts, turn_rewards=[])
        for _ in range(2):
            job = self.workers.job_on(machine)
            (outcome,) = await self._outcomes_on(job, prompt.text, [response])
            if not isinstance(outcome, str):
                return
        kind = str(outcome).partition(":")[0]
        raise ConfigError(
            f"The rewards were tried on the response {text[:80]!r} to prompt "
            f"{prompt.id}, before any response is sampled, and failed: {outcome}. The row's "
            f"columns: {', '.join(prompt.columns) or 'none'}. {KINDS[kind]}"
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
            facts = {"finish_reason": each.finish_reason, "num_tokens": each.num_tokens}
            columns = self._columns(prompt, **facts, turn_rewards=list(each.turn_rewards))
            responses.append((text, columns))
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
                    self._failure_stats.note(prompt.id, rollout.text, f"gave_up: {outcome.gave_up}")
            else:
                rollout.reward_failure = str(outcome)
        for rollout in rollouts:
            if rollout.reward_failure is not None:
                self._failure_stats.failure(prompt.id, rollout.text, rollout.reward_failure)
        self._failure_stats.check()

    def _columns(self, prompt: Prompt, **facts: Any) -> dict[str, Any]:
        found = {"prompt_messages": None, **prompt.columns, **facts}
        if prompt.chat is not None:
            found["prompt_messages"] = list(prompt.chat.messages)
        # A row's own would clash with the arguments.
        return {name: found[name] for name in found if name not in ("prompt", "response")}

    async def _last_outcome(self, prompt: str, response: Response, outcome: Outcome) -> Outcome:
        if outcome is None:
            (outcome,) = await self._outcomes(prompt, [response])
        if isinstance(outcome, str):
            self._failure_stats.counts["retried"] += 1
            (outcome,) = await self._outcomes(prompt, [response])
        return outcome

    async def _outcomes(self, prompt: str, responses: Sequence[Response]) -> list[Outcome]:
        """Returns the outcomes of a group from the least busy machine that is not lost."""
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
        """Returns the outcomes of a group on one machine. Raises WorkerLost."""
        count = len(responses)
        packed = pickle.dumps((prompt, list(responses)))
        try:
            outcomes = await job.begin(packed, partial(read_outcomes, count=count))
        except CallFailed as error:
            # It has ended the worker: the failure is that of the response whose code ran.
            failed = 0 if count == 1 else error.item
            reason = f"{error.kind}: {error.message}"
            return [reason if item == failed else None for item in range(count)]
        finally:
            job.end()
        return [f"{each}{job.where}" if isinstance(each, str) else each for each in outcomes]

    def _checked(self, outcome: Outcome) -> Outcome:
        """Refuses parts other than the first response's: a missing one would count as 0."""
        if not isinstance(outcome, Scored):
            return outcome
        self._parts = self._parts or set(outcome.parts)
        if outcome.parts.keys() == self._parts:
            return outcome
        return (
            f"wrong_shape: the parts are {sorted(outcome.parts)}, those of the first response "
            f"{sorted(self._parts)}; give 0.0 for one that does not apply"
        )


def read_outcomes(values: Any, count: int) -> list[Outcome]:
    """Returns the outcomes in a worker's JSON about `count` responses; else raises BadAnswer."""
    if not isinstance(values, list) or len(values) != count:
        raise BadAnswer(f"no list of {count} outcomes")
    try:
        return [Scored(*value) if isinstance(value, list) else value for value in values]
    except TypeError as error:
        raise BadAnswer(f"no outcomes ({error})") from error


def _longest(rewards: list[Reward], timeout_s: float | None) -> float:
    """Returns the seconds for a response, enough for each reward to give up or raise by itself:
    else a wrong response would have no reward, and an error would not say why."""
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


class FailureStats:
    """Counts responses, logs the first failure of each kind, and ends the run above a share."""

    def __init__(self, max_failures: float) -> None:
        self.max_failures = max_failures
        names = ("scored", "zero", "gave_up", "retried", *KINDS, *EPISODE_KINDS)
        self.counts = Counter(dict.fromkeys(names, 0))
        self._last: deque[str] = deque(maxlen=WINDOW)  # kind of failure, "" for a reward
        self._samples: dict[str, str] = {}

    def reward(self, value: float) -> None:
        self.counts["scored"] += 1
        self.counts["zero"] += value == 0
        self._last.append("")

    def failure(self, prompt_id: int, response: str, reason: str) -> None:
        """Counts a response without a reward; `reason` is `kind: message`."""
        self._last.append(reason.partition(":")[0])
        self.note(prompt_id, response, reason)

    def note(self, prompt_id: int, response: str, reason: str) -> None:
        """Counts what happened to a response, and logs the first of its kind."""
        kind = reason.partition(":")[0]
        self.counts[kind] += 1
        if kind not in self._samples:
            sample = f"Prompt {prompt_id}, response {response!r:.80}: {reason}"
            self._samples[kind] = sample
            what = "A verifier gave up." if kind == "gave_up" else "A response got no reward."
            log.warning("%s %s (The next of this kind are only counted.)", what, sample)

    def check(self) -> None:
        """Raises RewardFailuresError if too many of the last responses failed."""
        kinds = Counter(kind for kind in self._last if kind)
        if kinds.total() <= self.max_failures * WINDOW:
            return
        most = kinds.most_common(1)[0][0]
        by_kind = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
        raise RewardFailuresError(
            f"{kinds.total()} of the last {len(self._last)} responses got no reward, also when "
            f"tried again ({by_kind}); data.max_reward_failures is {self.max_failures:g}, a share "
            f"of {WINDOW} responses. {self._samples[most]}. {(KINDS | EPISODE_KINDS)[most]} Or "
            "raise data.max_reward_failures, if such responses may be left out; 1 allows any share."
        )
