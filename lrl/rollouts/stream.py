"""The step stream: what the trainer's loader yields. One item is one optimizer step, a lazy row of micro-batches.

A step's micro-batches start to train as soon as enough finished groups are there to fill one. The trainer waits and
packs inside the iteration; the stopwatch says when, and for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lrl.data import Group, MicroBatch
from lrl.rollouts.packing import Packer
from lrl.stopwatch import Stopwatch


class StepStream:
    """The micro-batches of one optimizer step.

    Args:
        next_group: Waits for the next group of this step.
        groups: How many groups the step trains.
        packer: Makes micro-batches of groups; its counts are the step's.
        step: The step's number, from 0: also the trainer's version while it trains.
        give_up: Told of each group that has too few scored answers to train.
        prepare: Called with each group before it is packed: adds what the loss needs to know about its answers.
        end: Called with all the step's groups when the last of them is packed.
        stopwatch: The trainer's.
        gather: Wait for all groups before the first is packed.
        replayed: Groups that the step trains again; they come first, while the fresh ones are still being written.
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
        self.groups: list[Group] = []
        self.waits: list[float] = []
        """Seconds of waiting for each of `groups`, without those for its rewards."""
        self.passes: list[tuple[float, list[int]]] = []
        """Each forward and backward pass: its seconds, and the tokens of each of its sequences."""

    def __iter__(self) -> Iterator[MicroBatch]:
        self._stopwatch.enter("pack")
        for micro in self._micro_batches():
            self._stopwatch.enter("train")
            yield micro
            self.passes.append((self._stopwatch.enter("pack"), micro.lengths))
        self._stopwatch.enter("train")

    def _micro_batches(self) -> Iterator[MicroBatch]:
        for group in self.replayed:
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
        """Answers with a token in the loss of the whole step; right once the iteration has ended."""
        return self._packer.sequences

    @property
    def packer(self) -> Packer:
        """What was packed, masked and discarded so far."""
        return self._packer


class StepLoader:
    """What Lightning iterates: one `StepStream` per optimizer step, made when it is asked for.

    Args:
        steps: Optimizer steps in an epoch.
        next_step: Makes the stream of the step that is next.
    """

    def __init__(self, steps: int, next_step: Callable[[], StepStream]) -> None:
        self._steps = steps
        self._next_step = next_step

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[StepStream]:
        while True:
            yield self._next_step()
