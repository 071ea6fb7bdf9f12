"""The step stream: the items of the trainer's loader. One item is one optimizer step, whose
micro-batches train as soon as the finished groups fill one for every rank.

Rank 0 waits and packs inside the iteration, and scatters the micro-batches to the other ranks; the
stopwatch records its waits by their reason.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from lrl.errors import LrlError
from lrl.rollouts.controller import Controller
from lrl.rollouts.learners import Learners
from lrl.rollouts.packing import Packer, Round
from lrl.system.event_loop import LoopThread
from lrl.system.ranks import Command, HasRanks
from lrl.system.stopwatch import Stopwatch
from lrl.types import Group, MicroBatch

log = logging.getLogger(__name__)

ANSWER_S = 60.0
"""Seconds for a call of the controller that waits for no rollout."""


class StepCounts(NamedTuple):
    """Counts of a step over all ranks; each rank receives them after its last micro-batch."""

    tokens: int
    sequences: int


@dataclass
class ControllerCalls:
    """The controller, for the trainer's thread: calls run on its loop, with a deadline."""

    controller: Controller
    loop: LoopThread
    _: KW_ONLY
    group_deadline_s: float
    """Seconds that a step waits for a group."""
    poll: Callable[[], None] | None = None
    """Called a few times a second while a step waits for a group; raises to end the wait."""

    def new_version(self, version: int) -> None:
        admission = self.controller.new_version(version)
        self.loop.wait(admission, ANSWER_S, f"admitting prompts for version {version}")

    def next_group(self, step: int) -> Group:
        return self.loop.wait(
            self.controller.next_group(step),
            self.group_deadline_s,
            f"waiting for a finished group for step {step}",
            self.poll,
        )

    def give_up(self, group: Group) -> None:
        self.controller.ledger.give_up(group)

    def raise_if_stopped(self) -> None:
        if self.loop.interrupted is not None:
            self.loop.interrupted()

    def state_dict(self, steps_done: int) -> dict[str, Any]:
        if self.loop.closed:
            return self.controller.state_dict(steps_done)

        async def read() -> dict[str, Any]:  # on the loop: no task writes meanwhile
            return self.controller.state_dict(steps_done)

        return self.loop.wait(read(), ANSWER_S, f"saving the ledger after step {steps_done}")


class StepStream:  # no dataclass: Lightning would copy its fields to a device
    """The micro-batches of one optimizer step, on the rank that has the groups.

    Args:
        step: From 0: also the trainer's version while it trains.
        groups: Number of groups that the step trains, from `source`.
        policy: `prepare` adds to a group what the loss needs of its responses (`PolicyModule`).
        learners: They learn from the groups once the step is done.
        packer: Its counts are the step's.
        gather: Whether the step waits for all of its groups before it packs the first.
        replayed: Groups that the step trains again, before the fresh ones.
    """

    def __init__(
        self,
        step: int,
        groups: int,
        *,
        source: ControllerCalls,
        policy: Any,
        learners: Learners,
        packer: Packer,
        stopwatch: Stopwatch,
        gather: bool = False,
        replayed: Sequence[Group] = (),
    ) -> None:
        self.step = step
        self.packer = packer
        self.replayed = replayed
        self._expected = groups
        self._source = source
        self._policy = policy
        self._learners = learners
        self._stopwatch = stopwatch
        self._gather = gather
        self.groups: list[Group] = []
        self.passes: list[tuple[float, list[int]]] = []
        """Each forward and backward pass of this rank: its seconds, and the tokens of each of its
        sequences."""

    def __iter__(self) -> Iterator[MicroBatch]:
        stopwatch, ranks = self._stopwatch, self._policy.ranks
        # Neighbours compute one micro-batch together.
        tensor_parallel_size = ranks.size // self._policy.data_parallel_size
        stopwatch.enter("pack")
        ranks.listening = True
        for each in self._rounds():
            self._source.raise_if_stopped()  # here, where the other ranks listen
            micro = ranks.scatter([one for one in each for _ in range(tensor_parallel_size)])
            if micro is None:
                continue
            stopwatch.enter("train")
            ranks.listening = False
            yield micro
            ranks.listening = True
            self.passes.append((stopwatch.enter("pack"), micro.lengths))
        if not any(group.has_tokens for group in (*self.groups, *self.replayed)):
            raise LrlError(f"Step {self.step}: not one of its responses has a token.")
        if not self.num_tokens:
            log.warning(
                "step %d has no trained token: %d are masked (data.mask_truncated, "
                "data.stragglers), and %d responses have no reward, or too few of their group.",
                self.step,
                self.packer.masked_tokens,
                self.packer.discarded_rollouts,
            )
        ranks.scatter([StepCounts(self.num_tokens, self.num_sequences)] * ranks.size)
        ranks.listening = False
        with stopwatch.within("ranks"):
            ranks.wait_sent()
        stopwatch.enter("train")

    def _rounds(self) -> Iterator[Round]:
        for group in self.replayed:
            self._prepare(group)  # the reference may have moved since the group was first trained
            yield from self.packer.add(group, replayed=True)
        arriving = (self._wait() for _ in range(self._expected))
        for group in list(arriving) if self._gather else arriving:
            self._prepare(group)
            full = self.packer.add(group)
            if group.index in self.packer.discarded_groups:
                self._source.give_up(group)
            yield from full
        yield from self.packer.flush()

    def _prepare(self, group: Group) -> None:
        with self._stopwatch.within("reference"):
            self._policy.prepare(group, self.packer)

    def finish(self) -> None:
        """See `Step`."""
        self._policy.ranks.listening = True
        # Not earlier: a step that an error ends is trained again after a resume.
        self._learners.end_step(self.step, self.groups)

    def _wait(self) -> Group:
        """Waits for the next group; the part that its rewards took is `wait_reward`."""
        stopwatch = self._stopwatch
        state = "wait_last" if len(self.groups) == self._expected - 1 else "wait_next"
        if not self.groups:
            state = "wait_first"
        before = stopwatch.seconds(state)
        stopwatch.enter(state)
        group = self._source.next_group(self.step)
        stopwatch.enter("pack")
        for_rewards = min(stopwatch.seconds(state) - before, group.scoring_s)
        stopwatch.move(for_rewards, state, "wait_reward")
        self.groups.append(group)
        return group

    @property
    def num_tokens(self) -> int:
        return self.packer.tokens

    @property
    def num_sequences(self) -> int:
        return self.packer.sequences


class RankStream:
    """One optimizer step on any other rank: the micro-batches that rank 0 scatters, and its
    commands in between."""

    def __init__(self, policy: HasRanks) -> None:
        self._policy = policy
        self.num_tokens = 0
        self.num_sequences = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        while not isinstance(message := self._policy.ranks.receive(), StepCounts):
            if isinstance(message, Command):
                message.obey(self._policy)
            elif message is not None:
                yield message
        self.num_tokens = message.tokens
        self.num_sequences = message.sequences

    def finish(self) -> None:
        """Rank 0 reports the groups."""
