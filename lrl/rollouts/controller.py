"""The loop from a prompt to a finished group: admit -> generate -> score -> group -> queue.

Pure asyncio, and every wait goes through the loop's own clock: the same code runs on a thread of rank 0 against vLLM
and on a virtual clock against a model of a fleet. It knows neither HTTP nor processes nor torch.

    new_version  waits for nothing     unblocks admission: pacing says which groups may start now
    _answer      one task per group    waits for a generator, then for the rewards; puts the group into the ledger
    next_group   the trainer's end     waits for a group that the ledger may hand to the step

A checkpoint has the groups that are still open, with their responses as far as they are written (`Ledger`). A resumed
run hands out the finished ones and goes on with the others, the oldest first.

A group whose responses all have the same reward has advantages of 0 under a group baseline. It may be skipped as soon
as it is scored, and a fresh prompt starts in its place: dynamic sampling (DAPO, 2503.14476, section 3.2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lrl.rollouts.ledger import Ledger
from lrl.rollouts.serialisation import Resumed
from lrl.types import Group, Prompt, Rollout, Sampling

log = logging.getLogger(__name__)


class Generates(Protocol):
    """Who writes responses; a `Fleet`, or a model of one."""

    async def generate(
        self, prompt: Prompt, rollouts: list[Rollout], sampling: Sampling, *, priority: int, due: int, deadline_s: float
    ) -> None:
        """Write every unfinished rollout to its end, in place.

        Tokens, behaviour log-probs and versions grow as they are streamed, and `finish_reason` is set at the end. A
        rollout that has tokens is continued. `len(rollouts) == sampling.n`. Older groups have a lower `priority`; `due`
        is the step that trains the group.
        """


class Scores(Protocol):
    """Who rewards responses; a `RewardPool`, or a model of one."""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        """Fill in the reward of each rollout, or why there is none."""


class PromptRow(Protocol):
    """The run's endless row of prompts."""

    def __getitem__(self, index: int) -> Prompt: ...


class Controller:
    """Keeps the generators writing and hands finished groups to the trainer.

    Args:
        prompts: The run's row of prompts.
        fleet: Who responses.
        rewards: Who scores.
        ledger: Where every group is.
        sampling: How responses are drawn; `n` is the size of a group.
        decode: Token ids to text.
        deadline_s: Seconds a response may take.
        max_skipped: Most groups with equal rewards that are skipped under one version; the others are trained.
        min_rollouts: Scored responses below which a group's rewards do not count as equal.
    """

    def __init__(
        self,
        prompts: PromptRow,
        fleet: Generates,
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
        """Tokens written in this run, those of the checkpoint it was resumed from not counted."""
        self.resumed: Resumed | None = None
        self._version = 0  # what the generators hold
        self._skips_left = 0  # under that version
        self._warned = False
        self._resuming: list[Group] = []  # running in the checkpoint, until the first version is there
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    async def new_version(self, version: int) -> None:
        """The generators hold `version`: admit what may start now."""
        self._version, self._skips_left = version, self.max_skipped
        resuming, self._resuming = self._resuming, []
        self._start(resuming)
        self._admit()

    def next_prompts(self) -> list[Prompt]:
        """The prompts of the next two steps, should no open group begin anew. Call it on the loop."""
        first, count = self.ledger.next_index, 2 * self.ledger.pacing.groups_per_step
        return [self.prompts[index] for index in range(first, first + count)]

    def _admit(self) -> None:
        self._start(self.ledger.admit(self._version, self._fresh_group))

    def _fresh_group(self, index: int) -> Group:
        rollouts = [Rollout() for _ in range(self.sampling.n)]
        return Group(index=index, prompt=self.prompts[index], rollouts=rollouts)

    def _start(self, groups: list[Group]) -> None:
        for group in groups:
            task = asyncio.create_task(self._response(group), name=f"group {group.index}")
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

    async def _response(self, group: Group) -> None:
        try:
            await self._write(group)
            await self._score(group)
            if has_equal_rewards(group, self.min_rollouts) and self._take_a_skip():
                self.ledger.skip(group)
                self._admit()
            else:
                self.ledger.finish(group)
        except Exception as error:  # not swallowed: the trainer raises it from `next_group`
            self._failure = self._failure or error
        async with self._changed:
            self._changed.notify_all()

    async def _write(self, group: Group) -> None:
        """Have a group's responses written to their ends; a checkpoint may hold whole ones that were not scored yet."""
        before, clock = group.num_tokens, asyncio.get_running_loop().time
        if not all(rollout.finished for rollout in group.rollouts):
            group.asked_s = clock()
            # Older groups first: they are what the trainer waits for.
            await self.fleet.generate(
                group.prompt,
                group.rollouts,
                self.sampling,
                priority=group.index,
                due=group.due,
                deadline_s=self.deadline_s,
            )
            group.written_s = clock()
        self.generated_tokens += group.num_tokens - before

    async def _score(self, group: Group) -> None:
        """Have a group's responses scored, and note how long that took."""
        clock = asyncio.get_running_loop().time
        started = clock()
        await score(group.prompt, group.rollouts, self.decode, self.rewards)
        group.scoring_s = clock() - started

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

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """The ledger after `steps_done` steps, and the settings that its open groups were made with.

        Call it on the loop, or when the loop has ended: between two waits of its tasks every response agrees with
        itself.
        """
        return self.ledger.state_dict(steps_done) | {"sampling": self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved; call it before the first version.

        Groups that other settings have made are generated anew.

        Raises:
            ValueError: `state` is of a run with other steps or other prompts.
        """
        self.ledger.load_state_dict(state, self.prompts.__getitem__)
        made_with, settings = state["sampling"], self._settings()
        if changed := [name for name in settings if settings[name] != made_with[name]]:
            self._restart_all(
                ", ".join(f"{name} was {made_with[name]:g} and is {settings[name]:g}" for name in changed)
            )
        self._resuming = sorted(self.ledger.running.values(), key=lambda group: (group.admitted_by, group.index))
        self.resumed = Resumed.of(state["steps_done"], self._resuming, finished_groups=len(self.ledger.finished))

    def _restart_all(self, why: str) -> None:
        groups = [*self.ledger.finished.values(), *self.ledger.running.values()]
        self.ledger.restart(groups)
        if groups:
            log.warning("%d open groups of the checkpoint are generated anew: %s.", len(groups), why)

    def _settings(self) -> dict[str, float]:
        """What responses of one run must share, by the names that a user sets."""
        return {
            "data.rollouts_per_group": self.sampling.n,
            "data.max_response_tokens": self.sampling.max_tokens,
            "data.temperature": self.sampling.temperature,
        }


def has_equal_rewards(group: Group, min_rollouts: int) -> bool:
    """Whether all scored responses of a group have the same reward, and are as many as a baseline needs."""
    rewards = [rollout.reward for rollout in group.scored]
    return len(rewards) >= min_rollouts and len(set(rewards)) == 1


async def score(prompt: Prompt, rollouts: list[Rollout], decode: Callable[[list[int]], str], rewards: Scores) -> None:
    """Decode and score responses that came straight from a generator."""
    for rollout in rollouts:
        rollout.text = decode(rollout.token_ids)
    await rewards.score(prompt, rollouts)
