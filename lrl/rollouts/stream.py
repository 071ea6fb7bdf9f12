"""The step stream: what the trainer's loader yields. One item is one optimizer step, a lazy row of micro-batches.

A step's micro-batches start to train as soon as enough finished groups are there to fill one for every rank. Rank 0
waits and packs inside the iteration, and hands the others theirs; the stopwatch says when it waits, and for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from lrl.rollouts.packing import Packer, Round
from lrl.runtime.ranks import Ranks
from lrl.runtime.stopwatch import Stopwatch
from lrl.types import Group, MicroBatch, Step


class StepCounts(NamedTuple):
    """What a step had over all ranks; each of them learns it behind its last micro-batch."""

    tokens: int
    sequences: int


class StepStream:
    """The micro-batches of one optimizer step, on the rank that has the groups.

    Args:
        next_group: Waits for the next group of this step.
        groups: How many groups the step trains.
        packer: Makes micro-batches of groups; its counts are the step's.
        step: The step's number, from 0: also the trainer's version while it trains.
        give_up: Told of each group that has too few scored responses to train.
        prepare: Called with each group before it is packed: adds what the loss needs to know about its responses.
        end: Called with all the step's groups when its optimizer step is done.
        stopwatch: The trainer's.
        gather: Wait for all groups before the first is packed.
        replayed: Groups that the step trains again; they come first, while the fresh ones are still being written.
        ranks: Who trains; the packer makes micro-batches for as many.
    """

    def __init__(
        self,
        next_group: Callable[[], Group],
        groups: int,
        packer: Packer,
        step: int,
        give_up: Callable[[Group], None],
        prepare: Callable[[Group], None],
        end: Callable[[list[Group]], None],
        stopwatch: Stopwatch,
        gather: bool,
        replayed: Sequence[Group] = (),
        ranks: Ranks | None = None,
    ) -> None:
        self._next_group = next_group
        self._expected = groups
        self._packer = packer
        self.step = step
        self._give_up = give_up
        self._prepare = prepare
        self._end = end
        self._stopwatch = stopwatch
        self._gather = gather
        self.replayed = replayed
        self._ranks = ranks or Ranks()
        self.groups: list[Group] = []
        self.waits: list[float] = []
        """Seconds of waiting for each of `groups`, without those for its rewards."""
        self.passes: list[tuple[float, list[int]]] = []
        """Each forward and backward pass of this rank: its seconds, and the tokens of each of its sequences."""

    def __iter__(self) -> Iterator[MicroBatch]:
        self._stopwatch.enter("pack")
        for each in self._rounds():
            micro = self._ranks.scatter(each)
            if micro is None:
                continue
            self._stopwatch.enter("train")
            yield micro
            self.passes.append((self._stopwatch.enter("pack"), micro.lengths))
        self._ranks.scatter([StepCounts(self.num_tokens, self.num_sequences)] * self._ranks.size)
        with self._stopwatch.within("ranks"):
            self._ranks.wait_sent()
        self._stopwatch.enter("train")

    def _rounds(self) -> Iterator[Round]:
        for group in self.replayed:
            with self._stopwatch.within("reference"):
                self._prepare(group)  # the reference may have moved since the group was first trained
            yield from self._packer.add(group, replayed=True)
        arriving = (self._wait() for _ in range(self._expected))
        for group in list(arriving) if self._gather else arriving:
            with self._stopwatch.within("reference"):
                self._prepare(group)
            full = self._packer.add(group)
            if group.index in self._packer.discarded_groups:
                self._give_up(group)
            yield from full
        yield from self._packer.flush()

    def finish(self) -> None:
        """See `Step`. What learns from whole steps is told here and not earlier: a step that an error ends is trained
        again after a resume, and would count twice."""
        self._end(self.groups)

    def _wait(self) -> Group:
        """The next group; what its rewards took of the wait is told apart."""
        number = len(self.groups)
        state = "wait_first" if number == 0 else "wait_last" if number == self._expected - 1 else "wait_next"
        before = self._stopwatch.seconds(state)
        self._stopwatch.enter(state)
        group = self._next_group()
        self._stopwatch.enter("pack")
        waited = self._stopwatch.seconds(state) - before
        for_rewards = min(waited, group.scoring_s)
        self._stopwatch.move(for_rewards, state, "wait_reward")
        self.waits.append(waited - for_rewards)
        self.groups.append(group)
        return group

    @property
    def num_tokens(self) -> int:
        """Answer tokens in the loss of the whole step: its denominator. Right once the iteration has ended."""
        return self._packer.tokens

    @property
    def num_sequences(self) -> int:
        """Responses with a token in the loss of the whole step; right once the iteration has ended."""
        return self._packer.sequences

    @property
    def packer(self) -> Packer:
        """What was packed, masked and discarded so far."""
        return self._packer


class RankStream:
    """One optimizer step on any other rank: the micro-batches that rank 0 hands out.

    Args:
        ranks: Who trains.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._counts = StepCounts(0, 0)

    def __iter__(self) -> Iterator[MicroBatch]:
        while not isinstance(given := self._ranks.receive(), StepCounts):
            if given is not None:
                yield given
        self._counts = given

    @property
    def num_tokens(self) -> int:
        """See `StepStream`."""
        return self._counts.tokens

    @property
    def num_sequences(self) -> int:
        """See `StepStream`."""
        return self._counts.sequences

    def finish(self) -> None:
        """Rank 0 keeps what is learnt from the step."""


class StepLoader:
    """What Lightning iterates: one step per optimizer step, made when it is asked for.

    Args:
        steps: Optimizer steps in an epoch.
        next_step: Makes the step that is next.
    """

    def __init__(self, steps: int, next_step: Callable[[], Step]) -> None:
        self._steps = steps
        self._next_step = next_step

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Step]:
        while True:
            yield self._next_step()
