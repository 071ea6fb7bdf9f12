"""Groups become micro-batches by token budget, while groups are still arriving.

Answers differ tenfold in length, so a fixed number of them per micro-batch would mostly be padding. Here a row is as
long as the micro-batch's longest rollout, and shorter ones share rows by best-fit decreasing. A micro-batch is cut as
soon as the waiting rollouts hold a whole budget of tokens; each cut takes the longest of them, and leaves the shortest,
which fit anywhere, for later.

Rollouts with an advantage of exactly 0 are packed like others. Under AIPO they have no gradient, under other objectives
they may.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lrl.advantages import Advantages
from lrl.data import Group, MicroBatch, Rollout


@dataclass(slots=True)
class _Sequence:
    """One rollout behind its prompt, with what the loss needs to know about it."""

    prompt: list[int]
    rollout: Rollout
    advantage: float
    trained: list[bool]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.rollout.token_ids)


class Packer:
    """Packs the groups of one step. Make a new one for each step: the counts are the step's.

    Args:
        micro_batch_tokens: Budget of a micro-batch: rows x row length, padding included. A single longer rollout gets a
            micro-batch of its own.
        advantages: The group baseline.
        temperature: Sampling temperature of the answers.
        oldest_version: Tokens written by an older version are masked out of the loss (trainer version - max_lag);
            None trains every token.

    Raises:
        ValueError: micro_batch_tokens or temperature is not above 0.
    """

    def __init__(
        self, micro_batch_tokens: int, advantages: Advantages, temperature: float, oldest_version: int | None = None
    ) -> None:
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens={micro_batch_tokens}: the budget must be at least 1 token")
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: greedy answers have no log-prob to learn from; use 1.0")
        self.micro_batch_tokens = micro_batch_tokens
        self.advantages = advantages
        self.temperature = temperature
        self.oldest_version = oldest_version
        self.tokens = 0
        """Answer tokens in the loss so far: the step's denominator once every group is in."""
        self.masked_tokens = 0
        """Answer tokens left out of the loss because they were over-age."""
        self.discarded_rollouts = 0
        """Answers without a reward, and those of discarded groups."""
        self.discarded_groups: list[int] = []
        """`Group.index` of each group with too few scored answers for a baseline."""
        self._waiting: list[_Sequence] = []

    def add(self, group: Group) -> Iterator[MicroBatch]:
        """Takes a finished group in, at once, and returns an iterator over the micro-batches that are full by now.

        What is not taken from the iterator stays for the next `add` or `flush`.
        """
        scored = group.scored
        self.discarded_rollouts += len(group.rollouts) - len(scored)
        if len(scored) < self.advantages.min_rollouts:
            self.discarded_rollouts += len(scored)
            self.discarded_groups.append(group.index)
            return iter(())
        advantages = self.advantages(torch.tensor([rollout.reward for rollout in scored], dtype=torch.float32))
        for rollout, advantage in zip(scored, advantages.tolist(), strict=True):
            self._take(_Sequence(group.prompt.token_ids, rollout, advantage, self._trained(rollout)))
        return self._full()

    def flush(self) -> Iterator[MicroBatch]:
        """The micro-batches of all that still waits."""
        while self._waiting:
            yield self._cut()

    def _trained(self, rollout: Rollout) -> list[bool]:
        return [self.oldest_version is None or version >= self.oldest_version for version in rollout.versions]

    def _take(self, sequence: _Sequence) -> None:
        trained = sum(sequence.trained)
        self.tokens += trained
        self.masked_tokens += len(sequence.trained) - trained
        if trained:
            self._waiting.append(sequence)

    def _full(self) -> Iterator[MicroBatch]:
        while sum(map(len, self._waiting)) >= self.micro_batch_tokens:
            yield self._cut()

    def _cut(self) -> MicroBatch:
        """One micro-batch out of the waiting rollouts: best-fit decreasing into at most budget // longest rows."""
        self._waiting.sort(key=len, reverse=True)
        length = len(self._waiting[0])
        max_rows = max(1, self.micro_batch_tokens // length)
        rows: list[list[_Sequence]] = []
        free: list[tuple[int, int]] = []  # (free tokens, row), sorted: the first that is large enough fits best
        left = []
        for sequence in self._waiting:
            best = bisect_left(free, (len(sequence), 0))
            if best < len(free):
                space, row = free.pop(best)
            elif len(rows) < max_rows:
                space, row = length, len(rows)
                rows.append([])
            else:
                left.append(sequence)
                continue
            rows[row].append(sequence)
            insort(free, (space - len(sequence), row))
        self._waiting = left
        return _micro_batch(rows, length, self.temperature)


def _micro_batch(rows: list[list[_Sequence]], length: int, temperature: float) -> MicroBatch:
    shape = (len(rows), length)
    batch = MicroBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        labels=torch.zeros(shape, dtype=torch.int64),
        mask=torch.zeros(shape, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(shape, dtype=torch.float32),
        advantages=torch.zeros(shape, dtype=torch.float32),
        versions=torch.full(shape, -1, dtype=torch.int64),
        sequence_ids=torch.full(shape, -1, dtype=torch.int64),
        temperature=temperature,
    )
    number = 0
    for row, sequences in enumerate(rows):
        start = 0
        for sequence in sequences:
            _place(batch, row, start, sequence, number)
            start += len(sequence)
            number += 1
        batch.position_ids[row, start:] = torch.arange(length - start)
    return batch


def _place(batch: MicroBatch, row: int, start: int, sequence: _Sequence, number: int) -> None:
    """Writes one sequence. An answer token is the label of the position before it; the first, of the prompt's end."""
    rollout, prompt = sequence.rollout, sequence.prompt
    whole = slice(start, start + len(sequence))
    batch.input_ids[row, whole] = torch.tensor(prompt + rollout.token_ids)
    batch.position_ids[row, whole] = torch.arange(len(sequence))
    batch.sequence_ids[row, whole] = number
    first = start + len(prompt) - 1
    trained = torch.tensor(sequence.trained)
    columns = torch.arange(first, first + len(trained))[trained]
    batch.mask[row, columns] = True
    batch.labels[row, columns] = torch.tensor(rollout.token_ids)[trained]
    batch.behaviour_logprobs[row, columns] = torch.tensor(rollout.logprobs)[trained]
    batch.advantages[row, columns] = sequence.advantage
    batch.versions[row, columns] = torch.tensor(rollout.versions)[trained]
