"""A run with the real ledger, pacing, controller and pool on a virtual clock, between models of the
other parts; with an environment, or without.

Nothing moves by itself: the test decides which response gets a token, which group is scored, when
the trainer asks, when a new generator is proved, and which part breaks. The model keeps an
independent record of the written tokens.
"""

import asyncio
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
from tests.generators.model_fleet import Asked, ModelClient, make_generator
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


class ManualClient(ModelClient):
    """A request waits until the test writes its responses."""

    async def fill(self, asked: Asked) -> None:
        for rollout in asked.rollouts:
            assert not rollout.finished, "a finished response is requested again"
            assert len(rollout.token_ids) < asked.sampling.max_tokens, (
                "max_tokens of 0 is requested"
            )
        await asked.done


@dataclass
class Record:
    """Expected state of the run, kept beside it."""

    step: int = 0
    """Steps done."""
    trained: list[int] = field(default_factory=list)
    turns: dict[ResponseKey, list[Rollout]] = field(default_factory=partial(defaultdict, list))
    """What generators have written of each response; a single turn without an environment."""
    rewards: dict[int, list[float | None]] = field(default_factory=dict)
    next_token: int = 0


def answer_to(turn: list[int]) -> tuple[list[int], bool, float]:
    number = sum(turn)
    return [10**6 + number % 7] if number % 3 else [], number % 3 == 2, number / 4


class World(Turns):
    """Answers after some seconds."""

    reads_tokens = True
    deterministic = True

    async def reply(self, turn: list[int]) -> Answer:
        COUNTS["replies"] += 1
        await asyncio.sleep(sum(turn) % 4)
        return answer_to(turn)


def answered(episode: Rollout, turn: Rollout) -> None:
    """Adds a turn and the answer that it gets to an episode."""
    observation, done, reward = answer_to(turn.token_ids)
    episode.token_ids += turn.token_ids
    episode.logprobs += turn.logprobs
    episode.versions += turn.versions
    episode.turn_ends.append(len(episode.token_ids))
    episode.turn_rewards.append(0.0 if turn.cut else reward)
    if done and not turn.cut:
        episode.finish_reason = "stop"
    elif len(episode.turn_ends) == MAX_TURNS and not turn.cut:
        episode.finish_reason = "turns"
    elif turn.cut or len(episode.token_ids) + len(observation) >= MAX_TOKENS:
        episode.finish_reason = "length"
    else:
        episode.token_ids += observation
        episode.logprobs += [0.0] * len(observation)
        episode.versions += [ENVIRONMENT] * len(observation)


def writing(rollout: Rollout) -> tuple[Any, ...]:
    """Returns all fields that a generator and an environment write."""
    r = flattened(rollout)
    return r.token_ids, r.logprobs, r.versions, r.finish_reason, r.turn_ends, r.turn_rewards


LIMITS = {"max_tokens": MAX_TOKENS, "max_turns": MAX_TURNS, "max_turn_tokens": MAX_TOKENS - 1}
OF_RUN = of_run(World(), episode_timeout_s=1e9, **LIMITS)
"""Made once: it reads the source of the class, which takes longer than the rest of a start."""
TEXT: Any = Numbers(tokenizer=Letters(10**7), ends=frozenset())  # type: ignore[arg-type]


@dataclass(eq=False)
class ModelledRun:
    """A trainer without a policy, with its run."""

    pacing: Pacing
    responses_each: int
    """To each prompt."""
    max_skipped: int
    """Most groups that are skipped under one version."""
    every: int
    """Chooses the number of steps between syncs, among those that the lag allows."""
    turns: bool
    """Whether there is an environment."""

    def __post_init__(self) -> None:
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
        self.in_step: list[int] = []
        self.request: asyncio.Task[Group] | None = None
        self.judging: dict[int, asyncio.Future[Sequence[float | None]]] = {}
        """index of a group that waits until the test scores it -> its rewards"""
        self.pool = GeneratorPool([self.new_generator() for _ in range(GENERATORS)])
        self.pool.on_evicted = self.replace
        self.ledger = Ledger(self.pacing)
        self.controller = Controller(
            Row(self.pacing.prompts_per_epoch),
            (self.episodes() if self.turns else self.pool).generate,
            self.score,
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

    def new_generator(self) -> Generator:
        return make_generator(0, PLACES, ManualClient())

    def episodes(self) -> Episodes:
        host = Here(World())
        host.counts = COUNTS
        OF_RUN.pool = host  # type: ignore[assignment]
        return Episodes(OF_RUN, self.pool.generate, TEXT)

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
        self.check(group)
        assert [rollout.reward for rollout in group.rollouts] == self.record.rewards[group.index]
        for rollout in group.rollouts:
            assert rollout.finished
            assert (rollout.reward is None) == (rollout.reward_failure is not None)
        if self.pacing.wait_for_stragglers:
            lag = self.record.step - group.oldest_version
            assert lag <= self.pacing.max_lag, f"a token lags {lag} versions"

    def check(self, group: Group) -> None:
        """Compares what is written of a group with the record."""
        assert len(group.rollouts) == self.responses_each
        for place, rollout in enumerate(group.rollouts):
            turns, answers = self.record.turns[group.index, place], len(rollout.turn_ends)
            assert answers <= sum(turn.finished for turn in turns), (
                "the environment has seen half a turn"
            )
            assert len(turns) <= answers + 1, "a finished turn is unfinished again"
            expected = Rollout()
            for turn in turns[:answers]:
                answered(expected, turn)
            expected.open_turn = turns[answers] if len(turns) > answers else None
            assert writing(rollout) == writing(expected), (
                "a token is lost, doubled or of another version, or an end is lost"
            )

    def train_on(self) -> None:
        """Makes the trainer's next move: a sync, the request for a group, or the end of its
        step."""
        step = self.record.step
        steps_between = 1 + self.every % (self.pacing.max_lag + 1)
        if self.version != step and step % steps_between == 0:
            self.sync()
        elif len(self.in_step) < self.pacing.groups_in(step):
            self.request = self.loop.create_task(self.controller.next_group(step))
            self.settle()
        else:
            self.record.trained += self.in_step
            self.record.step += 1
            self.in_step = []

    def poll(self) -> None:
        if self.pool.pending:
            self.sync()

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

    def replace(self, lost: Generator) -> None:
        self.pool.pending.append(self.new_generator())

    def dies(self, generator: Generator) -> None:
        self.loop.call_soon(self.pool.evict, generator, "its process has ended")
        self.settle()

    def leaves(self, generator: Generator) -> None:
        self.loop.call_soon(self.pool.remove, generator, "it has left the run")
        self.replace(generator)
        self.settle()

    def run(self, work: Any) -> None:
        self.loop.run_until_complete(work)

    def responses(self) -> Iterator[tuple[ResponseKey, Generator, Asked, Rollout]]:
        """Yields the responses of all open requests."""
        for generator in self.pool.generators:
            for asked in list(generator.client.open):  # type: ignore[attr-defined]
                group = self.ledger.running[asked.priority].rollouts
                written = [one.open_turn or one for one in group]
                for rollout in asked.rollouts:
                    places = [place for place, one in enumerate(written) if one is rollout]
                    assert places or rollout.finished, "a turn is written that no episode waits for"
                    for place in places:  # none if the episode is beyond this turn already
                        yield (asked.priority, place), generator, asked, rollout

    def unfinished(self) -> list[ResponseKey]:
        return [key for key, _, _, rollout in self.responses() if not rollout.finished]

    def write(self, index: int, place: int, tokens: int, ends: bool) -> None:
        """Writes some tokens of a response, at most up to its limit; it may end with them."""
        _, generator, asked, rollout = next(
            one for one in self.responses() if one[0] == (index, place)
        )
        turns = self.record.turns[index, place]
        if len(turns) == len(self.ledger.running[index].rollouts[place].turn_ends):
            turns.append(Rollout())
        both, most = (rollout, turns[-1]), asked.sampling.max_tokens
        for _ in range(min(tokens, most - len(rollout.token_ids))):
            self.record.next_token += 1
            for one in both:
                one.token_ids.append(self.record.next_token)
                one.logprobs.append(-self.record.next_token / 64)
                one.versions.append(generator.version)
        if ends or len(rollout.token_ids) == most:
            for one in both:
                one.finish_reason = "stop" if len(one.token_ids) < most else "length"
            self.loop.call_soon(asked.ended)
        if all(one.finished for one in asked.rollouts):
            asked.done.set_result(None)
            self.settle()

    def judge(self, index: int, rewards: list[float | None]) -> None:
        self.record.rewards[index] = rewards
        self.judging[index].set_result(rewards)
        self.settle()

    def fail(self, index: int) -> None:
        """Has the generator refuse a group's request."""
        asked = next(asked for key, _, asked, _ in self.responses() if key[0] == index)
        asked.done.set_exception(RequestRejected("no such token"))
        self.settle()

    def save(self) -> None:
        """Saves a checkpoint with the record of that moment."""
        state = as_file(self.controller.state_dict(self.record.step))
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
        for key in [key for key in record.turns if key[0] in indices]:
            del record.turns[key]
        self.checkpoint = pickle.dumps(record), self.checkpoint[1]
