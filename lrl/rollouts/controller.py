"""The loop from a prompt to a finished group: admit -> generate -> score -> group -> queue.

Pure asyncio, and every wait goes through the loop's own clock: the same code runs on a thread of rank 0 against vLLM
and on a virtual clock against a model of a fleet. It knows neither HTTP nor processes nor torch.

    new_version  waits for nothing     unblocks admission: pacing says which groups may start now
    _answer      one task per group    waits for a generator, then for the rewards; puts the group into the ledger
    next_group   the trainer's end     waits for a group that the ledger may hand to the step
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from lrl.data import Group, Prompt, Rollout
from lrl.generators.sampling import Sampling
from lrl.rollouts.ledger import Ledger


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
    ) -> None:
        self.prompts = prompts
        self.fleet = fleet
        self.rewards = rewards
        self.ledger = ledger
        self.sampling = sampling
        self.decode = decode
        self.deadline_s = deadline_s
        self.generated_tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    async def new_version(self, version: int) -> None:
        """The generators hold `version`: admit what may start now."""
        for index in self.ledger.admit(version):
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
            self.ledger.finish(Group(index=index, prompt=prompt, rollouts=rollouts))
        except Exception as error:  # not swallowed: the trainer raises it from `next_group`
            self._failure = self._failure or error
        async with self._changed:
            self._changed.notify_all()


async def score(prompt: Prompt, rollouts: list[Rollout], decode: Callable[[list[int]], str], rewards: Scores) -> None:
    """Decode and score answers that came straight from a generator."""
    for rollout in rollouts:
        rollout.text = decode(rollout.token_ids)
    await rewards.score(prompt, rollouts)
