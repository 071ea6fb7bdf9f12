"""The controller: the loop from a prompt to a finished group (admit -> generate -> score ->
ledger).

Pure asyncio, and every wait uses the loop's clock: the same code runs on a thread of rank 0 against
vLLM and on a virtual clock against a model of a fleet. It knows neither HTTP nor processes nor
torch.

    new_version  waits for nothing   admits the groups that may start now, by pacing
    _run         one task per group  waits for a generator, then for rewards; fills the ledger
    next_group   the trainer's end   waits for a group that the ledger may hand to the step

A group whose advantages are all 0 may be skipped as soon as it is scored, and a fresh prompt starts
in its place: dynamic sampling (DAPO, 2503.14476, section 3.2).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lrl.advantages import Advantages, GroupMean
from lrl.checkpoints.made_with import Settings, changes, fingerprint
from lrl.rollouts.ledger import Ledger, PromptRow
from lrl.types import Decode, Group, Prompt, Rollout, Sampling

if TYPE_CHECKING:
    from lrl.routing.length_predictor import LengthPredictor
    from lrl.training.beside.teacher import Teacher

log = logging.getLogger(__name__)

GROUPS_ASKED_AT_ONCE = 16
"""Groups whose responses a teacher's server reads at the same time; it batches them."""


class Resumed(NamedTuple):
    """Work that a resumed run continues."""

    responses: int
    """Half-written responses, with at least one token."""
    tokens: int
    """Of those."""
    finished_groups: int

    def __str__(self) -> str:
        return (
            f"Going on with {self.responses} half-written responses ({self.tokens:,} tokens) and "
            f"{self.finished_groups} finished groups of the checkpoint."
        )


Write = Callable[..., Awaitable[None]]
"""Writes every unfinished rollout to its end, in place: `GeneratorPool.generate`, or
`Episodes.generate`. A rollout that has tokens is continued, and `len(rollouts) == sampling.n`."""


Score = Callable[[Prompt, list[Rollout]], Awaitable[None]]
"""Sets the reward of each whole response, or the cause of its absence."""


@dataclass(eq=False)
class Controller:
    prompts: PromptRow
    write: Write
    score: Score
    ledger: Ledger
    sampling: Sampling
    """Of a request; `n` is the size of a group."""
    deadline_s: float
    """Most seconds for a response."""
    max_skipped: int = 0
    """Most groups that are skipped under one version, because they teach nothing by `advantages`;
    the others are trained."""
    advantages: Advantages = field(default_factory=GroupMean)
    lengths: LengthPredictor | None = None
    """Hears of each step's prompts before they start."""
    environment: Settings = field(default_factory=dict)
    """Settings of the environment on which the responses depend."""
    teacher: Teacher | None = None
    """The teacher on a server, which is asked about each group once it is scored."""

    def __post_init__(self) -> None:
        self.generated_tokens = 0
        """Tokens written in this run, without tokens of the checkpoint."""
        self.resumed: Resumed | None = None
        self._asking = asyncio.Semaphore(GROUPS_ASKED_AT_ONCE)
        self._version = -1  # of the generators
        self._skips_left = 0  # under that version
        # Groups that ran in the checkpoint, until the first version.
        self._resuming: list[Group] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None

    async def new_version(self, version: int) -> None:
        """Admits the groups that may start now that the generators hold `version`, or that one more
        of them does."""
        if version > self._version:
            self._version = version
            self._skips_left = self.max_skipped
        resuming, self._resuming = self._resuming, []
        self._start(resuming)
        self._admit()
        if self.lengths is not None:
            # The prompts of the next two steps, if no open group begins anew.
            first = self.ledger.next_index
            count = 2 * self.ledger.pacing.groups_per_step
            self.lengths.look_ahead([self.prompts[index] for index in range(first, first + count)])

    def _admit(self) -> None:
        self._start(self.ledger.admit(self._version, self.prompts, self.sampling.n))

    def _start(self, groups: list[Group]) -> None:
        for group in groups:
            task = asyncio.create_task(self._run(group), name=f"group {group.index}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def next_group(self, step: int) -> Group:
        """Returns the next group that `step` trains; raises the error of a generator or of the
        reward pool, after which the run cannot continue."""
        async with self._changed:
            # The failure goes first: its group will never come, and other groups would hide it.
            while self._failure is None:
                if (group := self.ledger.take(step)) is not None:
                    return group
                await self._changed.wait()
        raise self._failure

    async def _run(self, group: Group) -> None:
        try:
            clock = asyncio.get_running_loop().time
            before = group.num_tokens
            # A checkpoint may hold finished responses that were not scored yet.
            if not all(rollout.finished for rollout in group.rollouts):
                group.asked_s = clock()
                await self.write(
                    group.prompt,
                    group.rollouts,
                    self.sampling,
                    priority=group.index,  # older groups first: the trainer waits for them
                    due=group.due,
                    deadline_s=self.deadline_s,
                )
                group.written_s = clock()
            self.generated_tokens += group.num_tokens - before
            started = clock()
            await self.score(group.prompt, group.rollouts)
            if self.teacher is not None:
                async with self._asking:
                    await self.teacher.ask(group)
            group.scoring_s = clock() - started
            if self._may_skip(group):
                self.ledger.skip(group)
                self._admit()
            else:
                self.ledger.finish(group)
        except Exception as error:  # not swallowed: the trainer raises it from `next_group`
            self._failure = self._failure or error
        async with self._changed:
            self._changed.notify_all()

    def _may_skip(self, group: Group) -> bool:
        """Whether a group teaches nothing and this version has a skip left, which it takes."""
        if not self._skips_left or not self.advantages.teaches_nothing(group.rollouts):
            return False
        self._skips_left -= 1
        return True

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        """Returns the ledger after `steps_done` steps, and the settings of its open groups. Call it
        on the loop, where every response is consistent between two waits, or after its end."""
        return self.ledger.state_dict(steps_done) | {"sampling": self._settings()}

    def load_state_dict(self, state: dict[str, Any], other_rewards: str = "") -> None:
        """Restores `state`; call it before the first version. Groups of other settings are
        generated anew; of `other_rewards` (what has changed in them), or to changed rows, they are
        scored again. Raises ValueError as `Ledger.load_state_dict` does."""
        unscored = self.ledger.load_state_dict(state, self.prompts.__getitem__, not other_rewards)
        if why := changes(state["sampling"], self._settings()):
            groups = [*self.ledger.finished.values(), *self.ledger.running.values()]
            self.ledger.restart(groups)
            if number := len(groups):
                log.warning("%d open groups of the checkpoint are generated anew: %s.", number, why)
        elif unscored:
            why = other_rewards or "the columns of their rows have changed"
            log.warning("%d finished groups of the checkpoint are scored again: %s.", unscored, why)
        self._resuming = list(self.ledger.running.values())
        responses = (rollout for group in self._resuming for rollout in group.rollouts)
        lengths = [one.num_tokens for one in responses if one.num_tokens and not one.finished]
        if lengths or self.ledger.finished:
            finished = len(self.ledger.finished)
            self.resumed = Resumed(len(lengths), sum(lengths), finished)

    def _settings(self) -> Settings:
        return {
            "data.rollouts_per_group": self.sampling.n,
            "data.max_response_tokens": self.sampling.max_tokens,
            "data.temperature": self.sampling.temperature,
            "the end of the policy's responses": fingerprint(self.sampling.stop_tokens),
            **self.environment,
        }


async def score(
    prompt: Prompt,
    rollouts: list[Rollout],
    *,
    decode: Decode,
    rewards: Score,
    judges_last_turn: bool = False,
) -> None:
    """Decodes and scores whole responses; one whose episode has failed gets no reward. With
    `judges_last_turn` rewards get the text of each one's last turn alone."""
    for rollout in rollouts:
        rollout.text = decode(rollout.token_ids, prompt.token_ids)
        if judges_last_turn and rollout.turns:
            start, stop = rollout.turns[-1]
            path = rollout.path_to(start + 1)[:-1]
            before = prompt.token_ids + [rollout.token_ids[place] for place in path]
            rollout.judged = decode(rollout.token_ids[start:stop], before)
        rollout.reward_failure = rollout.failure or None
    await rewards(prompt, rollouts)
