"""A run with the real ledger, pacing, controller and pool on a virtual clock, between models of the
other parts; with an environment, or without.

Nothing moves by itself: the test decides which response gets a token, which group is scored, when
the trainer asks, when a new generator is proved, and which part breaks. The model keeps an
independent record of the written tokens.
"""

import asyncio
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lrl.environments import Turns
from lrl.environments.base import Answer
from lrl.errors import GeneratorError, RequestRejected
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.planning.clock import VirtualClock
from lrl.rollouts.controller import Controller
from lrl.rollouts.episodes.episode import Episodes
from lrl.rollouts.ledger import Ledger, Pacing, flattened
from lrl.types import ENVIRONMENT, Group, Prompt, Rollout, Sampling
from tests.checkpoints.through_files import as_file, from_file
from tests.environments.here import Here, of_run
from tests.generators.model_fleet import Asked, ManualClient, make_generator
from tests.rollouts.episodes.test_episode import Letters, Numbers

MAX_TOKENS = 6
MAX_TURNS = 3
GENERATORS, PLACES = 2, 8
"""And the responses that each of them writes at once."""

COUNTS = Counter[str]()
"""What came up in all runs of this process."""

ResponseKey = tuple[int, int]
"""(index of the group, place in the group)"""


@dataclass
class Row:
    """A data set of `size` prompts, repeated without end."""

    size: int

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(id=index % self.size, token_ids=[1, index % self.size], text=str(index))


class ManualRewards:
    """A model of the reward pool: a group waits until the test scores it."""

    def __init__(self) -> None:
        self.judging: dict[int, asyncio.Future[Sequence[float | None]]] = {}
        """index of a group -> its rewards"""

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> None:
        assert all(rollout.finished for rollout in rollouts)
        index = int(prompt.text)
        self.judging[index] = asyncio.get_running_loop().create_future()
        rewards = await self.judging[index]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.reward = reward
            rollout.reward_parts = {} if reward is None else {"right": reward}
            rollout.reward_failure = "crash: exit code 139" if reward is None else None
        del self.judging[index]


@dataclass
class Record:
    """Expected state of the run, kept beside it."""

    step: int = 0
    """Steps done."""
    trained: list[int] = field(default_factory=list)
    written: dict[int, list[Rollout]] = field(default_factory=dict)
    """index of a group -> its responses so far"""
    final: dict[ResponseKey, int] = field(default_factory=dict)
    """Turns of each response that have ended; one without an environment."""
    rewards: dict[int, list[float | None]] = field(default_factory=dict)
    next_token: int = 0


def writing(rollouts: Sequence[Rollout]) -> list[tuple[Any, ...]]:
    """Returns all fields that a generator and an environment write."""
    return [
        (r.token_ids, r.logprobs, r.versions, r.finish_reason, r.turn_ends, r.turn_rewards)
        for r in map(flattened, rollouts)
    ]


def current(rollout: Rollout) -> Rollout:
    """Returns what a generator writes of a rollout."""
    return rollout.open_turn or rollout


def whole_turns(rollout: Rollout) -> int:
    """Returns the turns that no generator writes any more; one without an environment."""
    if rollout.open_turn is not None:
        return len(rollout.turn_ends) + rollout.open_turn.finished
    return len(rollout.turn_ends) or int(rollout.finished)


def answer_to(turn: list[int]) -> tuple[list[int], bool, float]:
    number = sum(turn)
    return [10**6 + number % 7] if number % 3 else [], number % 3 == 2, number / 4


class World(Turns):
    """Answers after some seconds."""

    reads_tokens = True
    deterministic = True

    whole_before: ClassVar[int] = 0
    """The newest token of the checkpoint: a turn without a newer one was asked about before it."""

    async def reply(self, turn: list[int]) -> Answer:
        COUNTS["replies"] += 1
        COUNTS["replies asked again"] += max(turn) <= World.whole_before
        await asyncio.sleep(sum(turn) % 4)
        return answer_to(turn)


LIMITS = {"max_tokens": MAX_TOKENS, "max_turns": MAX_TURNS, "max_turn_tokens": MAX_TOKENS - 1}
TEXT: Any = Numbers(tokenizer=Letters(10**7), ends=frozenset())  # type: ignore[arg-type]


class ModelledRun:
    """A trainer without a policy, with its run.

    Args:
        pacing: The run's pacing.
        responses: Responses to each prompt.
        max_skipped: Most groups that are skipped under one version.
        every: Chooses the number of steps between syncs, among those that the lag allows.
        turns: Whether there is an environment.
    """

    def __init__(
        self, pacing: Pacing, responses: int, max_skipped: int, every: int, *, turns: bool
    ) -> None:
        self.pacing = pacing
        self.turns = turns
        self.responses_each = responses
        self.max_skipped = max_skipped
        self.every = every
        self.loop = VirtualClock()
        self.record = Record()
        self.resumes = 0
        self.other_rewards = ""
        """What has changed in the rewards when the run is resumed next."""
        self.start(None)
        self.save()

    def start(self, state: bytes | None) -> None:
        """Starts a new process, which has only the state of the old one."""
        COUNTS["starts and resumes"] += 1
        World.whole_before = self.record.next_token
        self.in_step: list[int] = []
        self.request: asyncio.Task[Group] | None = None
        self.judges = ManualRewards()
        self.pool = GeneratorPool(
            [make_generator(0, PLACES, ManualClient()) for _ in range(GENERATORS)]
        )
        self.pool.on_evicted = self.replace
        self.ledger = Ledger(self.pacing)
        self.environments = Here(World())
        self.environments.counts = COUNTS
        self.controller = Controller(
            Row(self.pacing.prompts_per_epoch),
            (self.episodes() if self.turns else self.pool).generate,
            self.judges.score,
            self.ledger,
            Sampling(n=self.responses_each, max_tokens=MAX_TOKENS),
            deadline_s=60.0,
            max_skipped=self.max_skipped,
        )
        if state is not None:
            self.controller.load_state_dict(from_file(state), self.other_rewards)
            self.other_rewards = ""
        self.sync()
        self.prove()  # a run waits until its first generators are proved

    def episodes(self) -> Episodes:
        made = of_run(self.environments, episode_timeout_s=1e9, **LIMITS)
        return Episodes(made, self.pool.generate, TEXT)

    def settle(self) -> None:
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
        """Treats a group of the step as the trainer does, and checks it."""
        self.in_step.append(group.index)
        for rollout in group.rollouts:
            rollout.reference_logprobs = list(rollout.logprobs)
            rollout.kl_penalty = 0.5
        if len(group.scored) < 2:
            self.ledger.give_up(group)
        self.catch_up(group)
        assert writing(group.rollouts) == writing(self.record.written[group.index])
        assert all(rollout.finished for rollout in group.rollouts)
        assert [rollout.reward for rollout in group.rollouts] == self.record.rewards[group.index]
        assert all(
            (rollout.reward is None) == (rollout.reward_failure is not None)
            for rollout in group.rollouts
        )
        if self.pacing.wait_for_stragglers:
            lag = self.record.step - group.oldest_version
            assert lag <= self.pacing.max_lag, f"a token lags {lag} versions"

    @property
    def lacks_groups(self) -> bool:
        return len(self.in_step) < self.pacing.groups_in(self.record.step)

    @property
    def version_is_due(self) -> bool:
        return (
            self.version != self.record.step
            and self.record.step % (1 + self.every % (self.pacing.max_lag + 1)) == 0
        )

    def train_on(self) -> None:
        """Makes the trainer's next move: a sync, the request for a group, or the end of its
        step."""
        if self.version_is_due:
            self.sync()
        elif self.lacks_groups:
            self.request = self.loop.create_task(self.controller.next_group(self.record.step))
            self.settle()
        else:
            self.end_step()

    def poll(self) -> None:
        if self.pool.pending:
            self.sync()

    def end_step(self) -> None:
        self.record.trained += self.in_step
        self.record.step = self.record.step + 1
        self.in_step = []

    def sync(self) -> None:
        """Syncs the generators to the newest version; new ones are still to be proved."""
        self.prove()  # no sync begins before the proofs of the last one have ended
        self.version = self.record.step
        self.run(self.pool.admit_pending())
        stale = [
            one for one in self.pool.generators if one.version != self.version or not one.serving
        ]
        for generator in stale:
            self.run(generator.pause())  # until then a later turn may still come to it
            for group in self.ledger.running.values():
                self.catch_up(group)
            self.run(generator.resume(self.version))
        self.run(self.pool.finish_sync({}))
        self.run(self.controller.new_version(self.version))
        self.settle()

    def prove(self, liars: Sequence[Generator] = ()) -> None:
        """Proves the new generators, and `liars`, which fail."""

        async def compare(generator: Generator) -> None:
            if generator in liars:
                raise GeneratorError("it does not compute what the policy computes")

        due = [one for one in self.pool.generators if one.in_proof or one in liars]
        self.run(self.pool.prove(due, compare))
        self.settle()

    def seal(self, key: ResponseKey) -> None:
        index, place = key
        self.record.final[key] = whole_turns(self.written(index)[place])

    def catch_up(self, group: Group) -> None:
        """Adds to the record the answers that episodes of the group have got."""
        if not self.turns:
            return
        for place, rollout in enumerate(group.rollouts):
            mirror = self.written(group.index)[place]
            ended = self.record.final.get((group.index, place), 0)
            assert len(rollout.turn_ends) <= ended, "the environment has seen half a turn"
            while len(mirror.turn_ends) < len(rollout.turn_ends):
                self.add_answer(mirror)

    def add_answer(self, mirror: Rollout) -> None:
        """Closes the open turn of a response in the record, and adds the answer that it gets."""
        turn, mirror.open_turn = mirror.open_turn, None
        assert turn is not None and turn.finished, "half a turn has an answer"
        observation, done, reward = answer_to(turn.token_ids)
        mirror.token_ids += turn.token_ids
        mirror.logprobs += turn.logprobs
        mirror.versions += turn.versions
        mirror.turn_ends.append(len(mirror.token_ids))
        mirror.turn_rewards.append(0.0 if turn.cut else reward)
        if done and not turn.cut:
            mirror.finish_reason = "stop"
        elif len(mirror.turn_ends) == MAX_TURNS and not turn.cut:
            mirror.finish_reason = "turns"
        elif turn.cut or len(mirror.token_ids) + len(observation) >= MAX_TOKENS:
            mirror.finish_reason = "length"
        else:
            mirror.open_turn = Rollout()
            mirror.token_ids += observation
            mirror.logprobs += [0.0] * len(observation)
            mirror.versions += [ENVIRONMENT] * len(observation)

    def replace(self, lost: Generator) -> None:
        self.pool.pending.append(make_generator(0, PLACES, ManualClient()))

    def dies(self, generator: Generator) -> None:
        self.loop.call_soon(self.pool.evict, generator, "its process has ended")
        self.settle()

    def leaves(self, generator: Generator) -> None:
        self.loop.call_soon(self.pool.remove, generator, "it has left the run")
        self.replace(generator)
        self.settle()

    def run(self, work: Any) -> None:
        self.loop.run_until_complete(work)

    def written(self, index: int) -> list[Rollout]:
        if index not in self.record.written:
            self.record.written[index] = [
                Rollout(open_turn=Rollout() if self.turns else None)
                for _ in range(self.responses_each)
            ]
        return self.record.written[index]

    def responses(self, generator: Generator) -> Iterator[tuple[ResponseKey, Asked, Rollout]]:
        """Yields the responses of a generator's open requests."""
        for asked in list(generator.client.requests):  # type: ignore[attr-defined]
            group = self.ledger.running[asked.group].rollouts
            for rollout in asked.rollouts:
                places = [place for place, its in enumerate(group) if current(its) is rollout]
                assert places or rollout.finished, "a turn is written that no episode waits for"
                for place in places:  # none if the episode is beyond this turn already
                    yield (asked.group, place), asked, rollout

    def unfinished(self) -> list[ResponseKey]:
        responses = (one for generator in self.pool.generators for one in self.responses(generator))
        return [response for response, _, rollout in responses if not rollout.finished]

    def write(self, index: int, place: int, tokens: int, ends: bool) -> None:
        """Writes some tokens of a response, at most up to its limit; it may end with them."""
        generator, asked, rollout = next(
            (generator, asked, rollout)
            for generator in self.pool.generators
            for response, asked, rollout in self.responses(generator)
            if response == (index, place)
        )
        self.catch_up(self.ledger.running[index])
        both = rollout, current(self.written(index)[place])
        for _ in range(min(tokens, asked.max_tokens - len(rollout.token_ids))):
            self.record.next_token += 1
            for one in both:
                one.token_ids.append(self.record.next_token)
                one.logprobs.append(-self.record.next_token / 64)
                one.versions.append(generator.version)
        if ends or len(rollout.token_ids) == asked.max_tokens:
            for one in both:
                one.finish_reason = "stop" if len(one.token_ids) < asked.max_tokens else "length"
            self.seal((index, place))
            self.loop.call_soon(asked.ended)
        if all(one.finished for one in asked.rollouts):
            asked.done.set_result(None)
            self.settle()

    def judge(self, index: int, rewards: list[float | None]) -> None:
        self.record.rewards[index] = rewards
        self.judges.judging[index].set_result(rewards)
        self.settle()

    def fail(self, index: int) -> None:
        """Has the generator refuse a group's request."""
        asked = next(
            asked
            for one in self.pool.generators
            for _, asked, _ in self.responses(one)
            if asked.group == index
        )
        asked.done.set_exception(RequestRejected("no such token"))
        self.settle()

    def save(self) -> None:
        """Saves a checkpoint with the record of that moment."""
        state = as_file(self.controller.state_dict(self.record.step))
        for group in [*self.ledger.running.values(), *self.ledger.finished.values()]:
            self.catch_up(group)
        self.checkpoint = pickle.dumps(self.record), state

    def crash(self) -> None:
        """Resumes from the last checkpoint; later events are undone."""
        self.resumes += 1
        self.cancel_all()
        record, state = self.checkpoint
        self.record = pickle.loads(record)
        self.start(state)

    def cancel_all(self) -> None:
        """Cancels all tasks: the end of a process."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(1.0))

    def stop(self) -> None:
        """Ends the run in order, in a step or between two, and resumes it."""
        self.save()
        self.crash()

    def forget(self, indices: set[int]) -> None:
        """Notes that these groups are generated anew after a resume from the last checkpoint."""
        record = pickle.loads(self.checkpoint[0])
        record.written = {
            index: responses for index, responses in record.written.items() if index not in indices
        }
        record.final = {key: ends for key, ends in record.final.items() if key[0] not in indices}
        self.checkpoint = pickle.dumps(record), self.checkpoint[1]
