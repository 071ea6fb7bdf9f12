"""The loop from a prompt to a finished group: admit -> generate -> score -> group -> queue.

Pure asyncio, and every wait goes through the loop's own clock: the same code runs on a thread of rank 0 against vLLM
and on a virtual clock against a model of a fleet. It knows neither HTTP nor processes nor torch.

    new_version  waits for nothing     unblocks admission: pacing says which groups may start now
    _answer      one task per group    waits for a generator, then for the rewards; puts the group into the ledger
    next_group   the trainer's end     waits for a group that the ledger may hand to the step

A group whose answers all have the same reward has advantages of 0 under a group baseline. It may be skipped as soon as
it is scored, and a fresh prompt starts in its place: dynamic sampling (DAPO, 2503.14476, section 3.2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from lrl.data import Group, Prompt, Rollout
from lrl.generators.sampling import Sampling
from lrl.rollouts.ledger import Ledger

log = logging.getLogger(__name__)


class Answers(Protocol):
    """Who writes answers; a `Fleet`, or a model of one."""

    async def answer(self, prompt: Prompt, sampling: Sampling, *, priority: int, deadline_s: float) -> list[Rollout]:
        """`sampling.n` answers to `prompt`."""


class Scores(Protocol):
    """Who rewards answers; a `RewardPool`, or a model of one."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Fill in the reward of each rollout, or why there is none."""


class PromptRow(Protocol):
    """The run's endless row of prompts."""

    def __getitem__(self, index: int) -> Prompt: ...


class Controller:
    """Keeps the generators writing and hands finished groups to the trainer.

    Args:
        prompts: The run's row of prompts.
        fleet: Who answers.
        rewards: Who scores.
        ledger: Where every group is.
        sampling: How answers are drawn; `n` is the size of a group.
        decode: Token ids to text.
        deadline_s: Seconds an answer may take.
        max_skipped: Most groups with equal rewards that are skipped under one version; the others are trained.
        min_rollouts: Scored answers below which a group's rewards do not count as equal.
    """

    def __init__(
        self,
        prompts: PromptRow,
        fleet: Answers,
        rewards: Scores,
        ledger: Ledger,
        sampling: Sampling,
        decode: Callable[[list[int]], str],
        deadline_s: float,
        max_skipped: int = 0,
        min_rollouts: int = 2,
    ) -> None:
        self.prompts = prompts
        self.fleet = fleet
        self.rewards = rewards
        self.ledger = ledger
        self.sampling = sampling
        self.decode = decode
        self.deadline_s = deadline_s
        self.max_skipped = max_skipped
        self.min_rollouts = min_rollouts
        self.generated_tokens = 0
        self._version = 0  # what the generators hold
        self._skips_left = 0  # under that version
        self._warned = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    async def new_version(self, version: int) -> None:
        """The generators hold `version`: admit what may start now."""
        self._version, self._skips_left = version, self.max_skipped
        self._admit()

    def _admit(self) -> None:
        for index in self.ledger.admit(self._version):
            task = asyncio.create_task(self._answer(index), name=f"group {index}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def next_group(self, step: int) -> Group:
        """The next group that `step` trains; waits until there is one.

        Raises:
            BaseException: What a generator or the reward pool raised; the run cannot go on.
        """
        async with self._changed:
            # The failure goes first: its group will never come, and while others do nobody would hear of it.
            while self._failure is None:
                if (group := self.ledger.take(step)) is not None:
                    return group
                await self._changed.wait()
        raise self._failure

    async def _answer(self, index: int) -> None:
        try:
            prompt = self.prompts[index]
            # Older groups first: they are what the trainer waits for.
            rollouts = await self.fleet.answer(prompt, self.sampling, priority=index, deadline_s=self.deadline_s)
            await score(prompt, rollouts, self.decode, self.rewards)
            self.generated_tokens += sum(len(rollout.token_ids) for rollout in rollouts)
            group = Group(index=index, prompt=prompt, rollouts=rollouts)
            if has_equal_rewards(group, self.min_rollouts) and self._take_a_skip():
                self.ledger.skip(group)
                self._admit()
            else:
                self.ledger.finish(group)
        except Exception as error:  # not swallowed: the trainer raises it from `next_group`
            self._failure = self._failure or error
        async with self._changed:
            self._changed.notify_all()

    def _take_a_skip(self) -> bool:
        """One skip less under this version, or False when none is left."""
        if self._skips_left:
            self._skips_left -= 1
            return True
        if self.max_skipped and not self._warned:
            self._warned = True
            log.warning(
                "All %d skips of version %d are used up (data.max_skipped_per_step), so groups with equal rewards are "
                "trained; against the mean of their own group they teach nothing. Raise it, or take prompts that are "
                "neither too easy nor too hard for the policy. (Said once.)",
                self.max_skipped,
                self._version,
            )
        return False


def has_equal_rewards(group: Group, min_rollouts: int) -> bool:
    """Whether all scored answers of a group have the same reward, and are as many as a baseline needs."""
    rewards = [rollout.reward for rollout in group.scored]
    return len(rewards) >= min_rollouts and len(set(rewards)) == 1


async def score(prompt: Prompt, rollouts: list[Rollout], decode: Callable[[list[int]], str], rewards: Scores) -> None:
    """Decode and score answers that came straight from a generator."""
    for rollout in rollouts:
        rollout.text = decode(rollout.token_ids)
    await rewards.score(prompt, rollouts)
