"""A run with the real ledger, pacing and controller on a virtual clock, and models of all that is around them.

Nothing moves by itself: whoever holds the run decides which answer gets a token, which group is judged, when the
trainer asks, and what breaks. Beside it stands a record of what was written, kept by the model alone.
"""

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field

from lrl.data import Group, Prompt, Rollout
from lrl.generators.sampling import Sampling
from lrl.planning.clock import VirtualClock
from lrl.rollouts.controller import Controller
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.pacing import Pacing
from tests.checkpoint_file import as_file, from_file

MAX_TOKENS = 6


class GeneratorsGone(RuntimeError):
    """No generator is left for an answer."""


@dataclass
class Row:
    """A data set of `size` prompts, over and over."""

    size: int

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=index % self.size, token_ids=[1, index % self.size], text=str(index))


class Waiting:
    """A model of the fleet and of the reward pool: what is asked waits until somebody sees to it."""

    def __init__(self) -> None:
        self.writing: dict[int, tuple[list[Rollout], asyncio.Future[None]]] = {}
        """index of a group -> its answers, and their end"""
        self.judging: dict[int, asyncio.Future[Sequence[float | None]]] = {}
        """index of a group -> what its answers are worth"""

    async def answer(
        self, prompt: Prompt, rollouts: list[Rollout], sampling: Sampling, *, priority: int, due: int, deadline_s: float
    ) -> None:
        assert len(rollouts) == sampling.n and not all(rollout.finished for rollout in rollouts)
        assert priority not in self.writing, "two write one group"
        ended = asyncio.get_running_loop().create_future()
        self.writing[priority] = rollouts, ended
        try:
            await ended
        finally:
            del self.writing[priority]

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        assert all(rollout.finished and rollout.text for rollout in rollouts)
        index = int(prompt.text)
        self.judging[index] = asyncio.get_running_loop().create_future()
        rewards = await self.judging[index]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward, rollout.reward_parts = reward, {} if reward is None else {"right": reward}
            rollout.reward_failure = "crash: exit code 139" if reward is None else None
        del self.judging[index]

    def unfinished(self) -> list[tuple[int, int]]:
        """(index of the group, place in it) of each answer that is being written."""
        return [
            (index, place)
            for index, (rollouts, _) in self.writing.items()
            for place, rollout in enumerate(rollouts)
            if not rollout.finished
        ]


@dataclass
class Record:
    """What is known of the run without asking it."""

    step: int = 0
    """Steps done."""
    trained: list[int] = field(default_factory=list)
    written: dict[int, list[Rollout]] = field(default_factory=dict)
    """index -> what was written of each answer"""
    rewards: dict[int, list[float | None]] = field(default_factory=dict)
    next_token: int = 0


def writing(rollouts: Sequence[Rollout]) -> list[tuple[list[int], list[float], list[int], str]]:
    """All that a generator decides."""
    return [(r.token_ids, r.logprobs, r.versions, r.finish_reason) for r in rollouts]


class ModelledRun:
    """A trainer without a policy, and what it trains.

    Args:
        pacing: Of the run.
        answers: Answers to each prompt.
        max_skipped: Most groups that are skipped under one version.
        every: Chooses the number of steps between syncs, among those that the lag allows.
    """

    def __init__(self, pacing: Pacing, answers: int, max_skipped: int, every: int) -> None:
        self.pacing, self.answers, self.max_skipped, self.every = pacing, answers, max_skipped, every
        self.loop = VirtualClock()
        self.record = Record()
        self.resumes = 0
        self.start(None)
        self.save()

    def start(self, state: bytes | None) -> None:
        """A new process: nothing of the old one is left but the state."""
        self.in_step: list[int] = []
        self.request: asyncio.Task[Group] | None = None
        self.waiting = Waiting()
        self.ledger = Ledger(self.pacing)
        self.controller = Controller(
            Row(self.pacing.prompts_per_epoch),
            self.waiting,
            self.waiting,
            self.ledger,
            Sampling(n=self.answers, max_tokens=MAX_TOKENS),
            str,
            deadline_s=60.0,
            max_skipped=self.max_skipped,
        )
        if state is not None:
            self.controller.load_state_dict(from_file(state))
        self.sync()

    def settle(self) -> None:
        """Let the loop do all it can."""
        self.loop.run_until_complete(asyncio.sleep(1.0))
        if self.request is None or not self.request.done():
            return
        request, self.request = self.request, None
        if error := request.exception():
            assert isinstance(error, GeneratorsGone)
            self.stop()  # the run ends with this error, and saves on its way out
        else:
            self.train(request.result())

    def train(self, group: Group) -> None:
        """The step has a group: treat it as the trainer does, and look at it."""
        self.in_step.append(group.index)
        for rollout in group.rollouts:
            rollout.reference_logprobs, rollout.kl_penalty = list(rollout.logprobs), 0.5
        if len(group.scored) < 2:
            self.ledger.give_up(group)
        assert writing(group.rollouts) == writing(self.record.written[group.index])
        assert all(rollout.finished for rollout in group.rollouts)
        assert [rollout.reward for rollout in group.rollouts] == self.record.rewards[group.index]
        assert all((rollout.reward is None) == (rollout.reward_failure is not None) for rollout in group.rollouts)
        if self.pacing.wait_for_stragglers:
            lag = self.record.step - group.oldest_version
            assert lag <= self.pacing.max_lag, f"a token lags {lag} versions"

    @property
    def lacks_groups(self) -> bool:
        """Whether the step has to train more groups."""
        return len(self.in_step) < self.pacing.groups_in(self.record.step)

    @property
    def version_is_due(self) -> bool:
        """Whether the generators are to be synced now."""
        return self.version != self.record.step and self.record.step % (1 + self.every % (self.pacing.max_lag + 1)) == 0

    def train_on(self) -> None:
        """The trainer's next move: a sync, the request for a group, or the end of its step."""
        if self.version_is_due:
            self.sync()
        elif self.lacks_groups:
            self.request = self.loop.create_task(self.controller.next_group(self.record.step))
            self.settle()
        else:
            self.end_step()

    def end_step(self) -> None:
        """The optimizer has made its step."""
        self.record.trained += self.in_step
        self.record.step, self.in_step = self.record.step + 1, []

    def sync(self) -> None:
        """The generators hold the newest version."""
        self.version = self.record.step
        self.loop.run_until_complete(self.controller.new_version(self.version))
        self.settle()

    def written(self, index: int) -> list[Rollout]:
        """What the record has of a group's answers."""
        return self.record.written.setdefault(index, [Rollout() for _ in range(self.answers)])

    def both(self, index: int, place: int) -> list[Rollout]:
        """An answer that is being written, and what the record has of it."""
        return [self.waiting.writing[index][0][place], self.written(index)[place]]

    def write(self, index: int, place: int, tokens: int, ends: bool) -> None:
        """Some tokens for an answer, at most up to its limit; it may end with them."""
        for _ in range(tokens):
            self.record.next_token += 1
            for rollout in self.both(index, place):
                rollout.token_ids.append(self.record.next_token)
                rollout.logprobs.append(-self.record.next_token / 64)
                rollout.versions.append(self.version)
            if len(rollout.token_ids) == MAX_TOKENS:
                break
        if ends or len(rollout.token_ids) == MAX_TOKENS:
            for rollout in self.both(index, place):
                rollout.finish_reason = "stop" if len(rollout.token_ids) < MAX_TOKENS else "length"
        rollouts, ended = self.waiting.writing[index]
        if all(rollout.finished for rollout in rollouts):
            ended.set_result(None)
            self.settle()

    def judge(self, index: int, rewards: list[float | None]) -> None:
        """The rewards of a group, as many as it has answers."""
        self.record.rewards[index] = rewards
        self.waiting.judging[index].set_result(rewards)
        self.settle()

    def fail(self, index: int) -> None:
        """Nobody can write a group's answers to their end."""
        self.waiting.writing[index][1].set_exception(GeneratorsGone("none left"))
        self.settle()

    def save(self) -> None:
        """A checkpoint, and the record as it was then."""
        state = as_file(self.controller.state_dict(self.record.step))
        self.checkpoint = pickle.dumps(self.record), state

    def crash(self) -> None:
        """Go on from the last checkpoint; what came after it has not been."""
        self.resumes += 1
        self.cancel_all()
        record, state = self.checkpoint
        self.record = pickle.loads(record)
        self.start(state)

    def cancel_all(self) -> None:
        """The end of a process."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(1.0))

    def stop(self) -> None:
        """End in order, in a step or between two, and go on."""
        self.save()
        self.crash()

    def forget(self, indices: set[int]) -> None:
        """These groups are generated anew if the run goes on from the last checkpoint."""
        record = pickle.loads(self.checkpoint[0])
        record.written = {index: answers for index, answers in record.written.items() if index not in indices}
        self.checkpoint = pickle.dumps(record), self.checkpoint[1]
