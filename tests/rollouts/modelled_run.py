"""A run with the real ledger, pacing, controller and pool on a virtual clock, and models of all that is around them.

Nothing moves by itself: whoever holds the run decides which answer gets a token, which group is judged, when the
trainer asks, when a sync is proved, and what breaks. Beside it stands a record of what was written, kept by the model
alone.
"""

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lrl.generators.client import GeneratorError, RequestRejected
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.planning.simulator.clock import VirtualClock
from lrl.rollouts.controller import Controller
from lrl.rollouts.ledger import Ledger
from lrl.rollouts.pacing import Pacing
from lrl.types import Group, Prompt, Rollout, Sampling
from tests.rollouts.modelled_generators import Asked, make_generator
from tests.runtime.checkpoint_file import as_file, from_file

MAX_TOKENS = 6
GENERATORS = 2

Answer = tuple[int, int]
"""The index of its group, and its place in it."""


@dataclass
class Row:
    """A data set of `size` prompts, over and over."""

    size: int

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=index % self.size, token_ids=[1, index % self.size], text=str(index))


class Judges:
    """A model of the reward pool: what is asked waits until somebody sees to it."""

    def __init__(self) -> None:
        self.judging: dict[int, asyncio.Future[Sequence[float | None]]] = {}
        """index of a group -> what its responses are worth"""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        assert all(rollout.finished and rollout.text for rollout in rollouts)
        index = int(prompt.text)
        self.judging[index] = asyncio.get_running_loop().create_future()
        rewards = await self.judging[index]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward, rollout.reward_parts = reward, {} if reward is None else {"right": reward}
            rollout.reward_failure = "crash: exit code 139" if reward is None else None
        del self.judging[index]


@dataclass
class Record:
    """What is known of the run without asking it."""

    step: int = 0
    """Steps done."""
    trained: list[int] = field(default_factory=list)
    written: dict[int, list[Rollout]] = field(default_factory=dict)
    """index -> what was written of each answer"""
    final: set[Answer] = field(default_factory=set)
    """Responses that have ended under a proved version."""
    rewards: dict[int, list[float | None]] = field(default_factory=dict)
    next_token: int = 0


def writing(rollouts: Sequence[Rollout]) -> list[tuple[list[int], list[float], list[int], str]]:
    """All that a generator decides."""
    return [(r.token_ids, r.logprobs, r.versions, r.finish_reason) for r in rollouts]


def cut(rollout: Rollout, length: int) -> None:
    """Unwrite what is behind `length` tokens, and the end."""
    del rollout.token_ids[length:], rollout.logprobs[length:], rollout.versions[length:]
    rollout.finish_reason = ""


class ModelledRun:
    """A trainer without a policy, and what it trains.

    Args:
        pacing: Of the run.
        responses: Responses to each prompt.
        max_skipped: Most groups that are skipped under one version.
        every: Chooses the number of steps between syncs, among those that the lag allows.
    """

    def __init__(self, pacing: Pacing, responses: int, max_skipped: int, every: int) -> None:
        self.pacing, self.responses_each, self.max_skipped, self.every = pacing, responses, max_skipped, every
        self.loop = VirtualClock()
        self.record = Record()
        self.resumes = 0
        self.start(None)
        self.save()

    def start(self, state: bytes | None) -> None:
        """A new process: nothing of the old one is left but the state."""
        self.in_step: list[int] = []
        self.request: asyncio.Task[Group] | None = None
        self.judges = Judges()
        self.pool = GeneratorPool([make_generator() for _ in range(GENERATORS)])
        self.pool.on_evicted = self.replace
        self.unverified: dict[Generator, dict[Answer, int]] = {}
        """Of each generator that nobody has proved since its resume: what was unfinished then, and its tokens."""
        self.ledger = Ledger(self.pacing)
        self.controller = Controller(
            Row(self.pacing.prompts_per_epoch),
            self.pool,
            self.judges,
            self.ledger,
            Sampling(n=self.responses_each, max_tokens=MAX_TOKENS),
            str,
            deadline_s=60.0,
            max_skipped=self.max_skipped,
        )
        if state is not None:
            self.controller.load_state_dict(from_file(state))
        self.sync()
        self.verify()  # a run waits for its first proof

    def settle(self) -> None:
        """Let the loop do all it can."""
        self.loop.run_until_complete(asyncio.sleep(1.0))
        if self.request is None or not self.request.done():
            return
        request, self.request = self.request, None
        if error := request.exception():
            if not isinstance(error, RequestRejected):
                raise error
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

    def poll(self) -> None:
        """What a waiting trainer does: whoever came takes part."""
        if self.pool.pending:
            self.sync()

    def end_step(self) -> None:
        """The optimizer has made its step."""
        self.record.trained += self.in_step
        self.record.step, self.in_step = self.record.step + 1, []

    def sync(self) -> None:
        """The generators write on under the newest version, which is to be proved."""
        self.verify()  # no sync begins before the last one is proved
        self.version = self.record.step
        self.run(self.pool.admit_pending())
        stale = [one for one in self.pool.generators if one.version != self.version or not one.open]
        for generator in stale:
            unfinished = [response for response, _, rollout in self.responses(generator) if not rollout.finished]
            self.unverified[generator] = {
                (index, place): len(self.written(index)[place].token_ids) for index, place in unfinished
            }
            self.run(generator.pause())
            self.run(generator.resume(self.version))
        self.run(self.pool.finish_sync({}))
        self.run(self.controller.new_version(self.version))
        self.settle()

    def verify(self, liars: Sequence[Generator] = ()) -> None:
        """Whoever waits for its proof gets it; `liars` fail."""

        async def probe(generator: Generator) -> None:
            if generator in liars:
                raise GeneratorError("it does not compute what the policy computes")

        unverified = [generator for generator in self.pool.generators if generator.unverified]
        for generator in unverified:
            if generator in liars:
                self.cut_unproved(generator)
            else:
                self.unverified.pop(generator)
                self.seal(generator)
        self.run(self.pool.verify(unverified, probe))
        self.settle()

    def seal(self, generator: Generator) -> None:
        """What has ended there is final."""
        self.record.final |= {response for response, _, rollout in self.responses(generator) if rollout.finished}

    def cut_unproved(self, generator: Generator) -> None:
        """Take back in the record what `generator` wrote unproved; what had ended before has ended."""
        for (index, place), length in self.unverified.pop(generator, {}).items():
            cut(self.written(index)[place], length)

    def replace(self, lost: Generator) -> None:
        """Another one waits for the next sync."""
        self.pool.pending.append(make_generator())

    def dies(self, generator: Generator) -> None:
        """The process of a generator ends."""
        self.cut_unproved(generator)
        self.loop.call_soon(self.pool.evict, generator, "its process has ended")
        self.settle()

    def leaves(self, generator: Generator) -> None:
        """A generator is asked to leave, and another one joins."""
        self.cut_unproved(generator)
        self.loop.call_soon(self.pool.remove, generator, "it has left the run")
        self.replace(generator)
        self.settle()

    def run(self, work: Any) -> None:
        """Do `work` on the loop."""
        self.loop.run_until_complete(work)

    def written(self, index: int) -> list[Rollout]:
        """What the record has of a group's responses."""
        return self.record.written.setdefault(index, [Rollout() for _ in range(self.responses_each)])

    def responses(self, generator: Generator) -> Iterator[tuple[Answer, Asked, Rollout]]:
        """What a generator has been asked and not ended, with its responses."""
        for asked in list(generator.client.requests):  # type: ignore[attr-defined]
            group = self.ledger.running[asked.group].rollouts
            for rollout in asked.rollouts:
                place = next(place for place, its in enumerate(group) if its is rollout)
                yield (asked.group, place), asked, rollout

    def unfinished(self) -> list[Answer]:
        """The responses that are being written."""
        responses = (one for generator in self.pool.generators for one in self.responses(generator))
        return [response for response, _, rollout in responses if not rollout.finished]

    def write(self, index: int, place: int, tokens: int, ends: bool) -> None:
        """Some tokens for a response that is being written, at most up to its limit; it may end with them."""
        generator, asked, rollout = next(
            (generator, asked, rollout)
            for generator in self.pool.generators
            for response, asked, rollout in self.responses(generator)
            if response == (index, place)
        )
        both = rollout, self.written(index)[place]
        for _ in range(min(tokens, MAX_TOKENS - len(rollout.token_ids))):
            self.record.next_token += 1
            for one in both:
                one.token_ids.append(self.record.next_token)
                one.logprobs.append(-self.record.next_token / 64)
                one.versions.append(generator.version)
        if ends or len(rollout.token_ids) == MAX_TOKENS:
            for one in both:
                one.finish_reason = "stop" if len(one.token_ids) < MAX_TOKENS else "length"
            if not generator.unverified:
                self.record.final.add((index, place))
            self.loop.call_soon(asked.ended)
        if all(one.finished for one in asked.rollouts):
            asked.done.set_result(None)
            self.settle()

    def judge(self, index: int, rewards: list[float | None]) -> None:
        """The rewards of a group, as many as it has responses."""
        self.record.rewards[index] = rewards
        self.judges.judging[index].set_result(rewards)
        self.settle()

    def fail(self, index: int) -> None:
        """No generator can write a group's responses."""
        asked = next(
            asked for one in self.pool.generators for _, asked, _ in self.responses(one) if asked.group == index
        )
        asked.done.set_exception(RequestRejected("no such token"))
        self.settle()

    def save(self) -> None:
        """A checkpoint, and the record as it was then; it waits for the proof."""
        self.verify()
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

    def save_on_the_way_out(self) -> None:
        """Nobody waits for a proof any more: what is unproved is taken back, and the rest is saved."""
        for generator in self.pool.generators:
            self.cut_unproved(generator)
        self.run(self.pool.drop_unverified("the run ends"))
        self.save()

    def stop(self) -> None:
        """End in order, in a step or between two, and go on."""
        self.save_on_the_way_out()
        self.crash()

    def forget(self, indices: set[int]) -> None:
        """These groups are generated anew if the run goes on from the last checkpoint."""
        record = pickle.loads(self.checkpoint[0])
        record.written = {index: responses for index, responses in record.written.items() if index not in indices}
        record.final = {(index, place) for index, place in record.final if index not in indices}
        self.checkpoint = pickle.dumps(record), self.checkpoint[1]
