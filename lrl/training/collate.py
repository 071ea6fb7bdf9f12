"""Collation of rollouts into the tensors of a micro-batch; all index calculations are here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lrl.types import Group, MicroBatch, Rollout


@dataclass(slots=True)
class TrainingSample:
    """One rollout after its prompt, with the inputs of its loss."""

    group: int
    """`Group.index`."""
    prompt: list[int]
    rollout: Rollout
    advantages: Tensor
    """float32 [response tokens], or [] for all of them."""
    trained: list[bool]

    @property
    def partial(self) -> bool:
        """Whether only some of the policy's own tokens are trained."""
        return any(self.trained) and sum(self.trained) < sum(self.rollout.mask)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.rollout.token_ids)


def text_sequence(token_ids: list[int], group: int = 0) -> TrainingSample:
    """Returns a text as a rollout after a prompt of one token: every token but the first is a
    label."""
    first, *rest = token_ids
    rollout = Rollout(token_ids=rest, logprobs=[0.0] * len(rest), versions=[0] * len(rest))
    return TrainingSample(
        group, [first], rollout=rollout, advantages=torch.zeros(()), trained=[True] * len(rest)
    )


def blank() -> MicroBatch:
    """Returns a micro-batch without a token in the mask, for a rank that must take part in a
    pass."""
    nothing = Rollout(token_ids=[0], logprobs=[0.0], versions=[0])
    return fill_rows(
        [[TrainingSample(0, [0], rollout=nothing, advantages=torch.zeros(()), trained=[False])]],
        temperature=1.0,
    )


def each_rollout(
    group: Group,
    temperature: float,
    micro_batch_tokens: int,
    compute: Callable[[Sequence[MicroBatch]], list[Tensor]],
) -> Iterator[tuple[Rollout, Tensor]]:
    """Yields each rollout of a group that has a token, with one number for each of its tokens.

    Args:
        group: The group.
        temperature: Sampling temperature of the run.
        micro_batch_tokens: Most tokens of a pass, padding included; a longer rollout gets its own.
        compute: Returns [R, L] for each of the micro-batches, as `MicroBatch.labels` are laid out.
    """
    batches = list(_batches(group, micro_batch_tokens))
    micros = [unpacked(group, rollouts, temperature) for rollouts in batches]
    for rollouts, micro, found in zip(batches, micros, compute(micros), strict=True):
        for rollout, row, mask in zip(rollouts, found, micro.mask, strict=True):
            yield rollout, row[mask]


def _batches(group: Group, micro_batch_tokens: int) -> Iterator[list[Rollout]]:
    """Splits the rollouts with a token into parts of at most `micro_batch_tokens`, padding
    included."""
    prompt = len(group.prompt.token_ids)
    # The longest first: rollouts of similar length need little padding.
    left = sorted(
        (one for one in group.rollouts if one.token_ids), key=lambda one: -len(one.token_ids)
    )
    while left:
        rows = max(1, micro_batch_tokens // (prompt + len(left[0].token_ids)))
        yield left[:rows]
        left = left[rows:]


def unpacked(group: Group, rollouts: list[Rollout], temperature: float) -> MicroBatch:
    """Returns rollouts of a group, each with at least one token and in its own row, with every
    token in the mask."""
    zero = torch.zeros(())
    rows = [
        [
            TrainingSample(
                group.index,
                group.prompt.token_ids,
                rollout=r,
                advantages=zero,
                trained=[True] * len(r.token_ids),
            )
        ]
        for r in rollouts
    ]
    return fill_rows(rows, temperature)


def fill_rows(rows: list[list[TrainingSample]], temperature: float) -> MicroBatch:
    """Returns the micro-batch of these rows, padded to the longest."""
    shape = (len(rows), max(sum(map(len, row)) for row in rows))
    sequences = [sequence for row in rows for sequence in row]
    referenced = all(sequence.rollout.reference_logprobs is not None for sequence in sequences)
    valued = all(sequence.rollout.returns is not None for sequence in sequences)
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
        values=torch.zeros(shape, dtype=torch.float32) if valued else None,
        returns=torch.zeros(shape, dtype=torch.float32) if valued else None,
        partial=any(sequence.partial for sequence in sequences),
    )
    groups = {
        group: number
        for number, group in enumerate(dict.fromkeys(sequence.group for sequence in sequences))
    }
    number = 0
    for row, members in enumerate(rows):
        start = 0
        for sequence in members:
            whole = slice(start, start + len(sequence))
            batch.sequence_ids[row, whole] = number
            batch.group_ids[row, whole] = groups[sequence.group]
            _write(batch, row, whole, sequence)
            start = whole.stop
            number += 1
        # Any token pads in most models. But an embedding of zeros, usual for a padding token, has
        # no finite gradient in Gemma 3n.
        batch.input_ids[row, start:] = batch.input_ids[row, start - 1]
        batch.position_ids[row, start:] = torch.arange(shape[1] - start)
    return batch


def _write(batch: MicroBatch, row: int, whole: slice, sequence: TrainingSample) -> None:
    rollout, prompt = sequence.rollout, sequence.prompt
    token_ids = batch.labels.new_tensor(rollout.token_ids)
    batch.input_ids[row, whole] = torch.cat([batch.labels.new_tensor(prompt), token_ids])
    batch.position_ids[row, whole] = torch.arange(len(sequence))
    # A response token is the label of the position before it, so the first one belongs to the end
    # of the prompt.
    first = whole.start + len(prompt) - 1
    trained = batch.mask.new_tensor(sequence.trained)
    columns = torch.arange(first, first + len(trained))[trained]
    batch.mask[row, columns] = True
    batch.labels[row, columns] = token_ids[trained]
    batch.advantages[row, columns] = sequence.advantages.expand(len(trained))[trained]
    batch.versions[row, columns] = batch.versions.new_tensor(rollout.versions)[trained]
    for field, numbers in (
        (batch.behaviour_logprobs, rollout.logprobs),
        (batch.reference_logprobs, rollout.reference_logprobs),
        (batch.values, rollout.values),
        (batch.returns, rollout.returns),
    ):
        if field is not None:
            field[row, columns] = field.new_tensor(numbers)[trained]
