"""Rollouts laid side by side in rows: the tensors of a micro-batch, and every index calculation they need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lrl.types import Group, MicroBatch, Rollout


@dataclass(slots=True)
class Sequence:
    """One rollout behind its prompt, with what the loss needs to know about it."""

    group: int
    """`Group.index`."""
    prompt: list[int]
    rollout: Rollout
    advantages: Tensor
    """float32 [answer tokens], or [] for all of them."""
    trained: list[bool]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.rollout.token_ids)


def one_a_row(group: Group, rollouts: list[Rollout], temperature: float) -> MicroBatch:
    """Some rollouts of a group, each with at least one token, each in a row of its own, every token in the mask."""
    zero = torch.zeros(())
    everything = [[True] * len(rollout.token_ids) for rollout in rollouts]
    pairs = zip(rollouts, everything, strict=True)
    rows = [[Sequence(group.index, group.prompt.token_ids, one, zero, trained)] for one, trained in pairs]
    return fill_rows(rows, temperature)


def fill_rows(rows: list[list[Sequence]], temperature: float) -> MicroBatch:
    """The micro-batch of these rows, as long as the longest.

    Padding repeats the row's last token. Any token would do in most models, but Gemma 3n has no finite gradient at one
    with an embedding of zeros, as that for padding often is.
    """
    shape = (len(rows), max(sum(map(len, row)) for row in rows))
    sequences = [sequence for row in rows for sequence in row]
    referenced = all(sequence.rollout.reference_logprobs is not None for sequence in sequences)
    batch = MicroBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        labels=torch.zeros(shape, dtype=torch.int64),
        mask=torch.zeros(shape, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(shape, dtype=torch.float32),
        advantages=torch.zeros(shape, dtype=torch.float32),
        versions=torch.full(shape, -1, dtype=torch.int64),
        sequence_ids=torch.full(shape, -1, dtype=torch.int64),
        group_ids=torch.full(shape, -1, dtype=torch.int64),
        temperature=temperature,
        reference_logprobs=torch.zeros(shape, dtype=torch.float32) if referenced else None,
    )
    groups = {group: number for number, group in enumerate(dict.fromkeys(sequence.group for sequence in sequences))}
    number = 0
    for row, members in enumerate(rows):
        start = 0
        for sequence in members:
            whole = slice(start, start + len(sequence))
            batch.sequence_ids[row, whole] = number
            batch.group_ids[row, whole] = groups[sequence.group]
            _place(batch, row, start, sequence)
            start += len(sequence)
            number += 1
        batch.input_ids[row, start:] = batch.input_ids[row, start - 1]
        batch.position_ids[row, start:] = torch.arange(shape[1] - start)
    return batch


def _place(batch: MicroBatch, row: int, start: int, sequence: Sequence) -> None:
    """Writes one sequence. A response token is the label of the position before it; the first, of the prompt's end."""
    rollout, prompt = sequence.rollout, sequence.prompt
    whole = slice(start, start + len(sequence))
    batch.input_ids[row, whole] = torch.tensor(prompt + rollout.token_ids)
    batch.position_ids[row, whole] = torch.arange(len(sequence))
    first = start + len(prompt) - 1
    trained = torch.tensor(sequence.trained)
    columns = torch.arange(first, first + len(trained))[trained]
    batch.mask[row, columns] = True
    batch.labels[row, columns] = torch.tensor(rollout.token_ids)[trained]
    batch.behaviour_logprobs[row, columns] = torch.tensor(rollout.logprobs)[trained]
    batch.advantages[row, columns] = sequence.advantages.expand(len(trained))[trained]
    batch.versions[row, columns] = torch.tensor(rollout.versions)[trained]
    if batch.reference_logprobs is not None:
        batch.reference_logprobs[row, columns] = torch.tensor(rollout.reference_logprobs)[trained]
