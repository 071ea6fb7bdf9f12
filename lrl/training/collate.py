"""Collation of rollouts into the tensors of a micro-batch; all index calculations are here."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from lrl.training.prefix_tree import PrefixTree, TrainingSample, prefix_trees, samples_of
from lrl.types import Group, MicroBatch, Rollout, SequenceBounds, Step

Numbers = Iterator[tuple[Rollout, Tensor]]
"""Rollouts, each with one number or several for each of its tokens."""


def text_sequence(token_ids: list[int], group: int = 0) -> TrainingSample:
    """Returns a text as a rollout after one token: every token but the first is a label."""
    first, *rest = token_ids
    rollout = Rollout(token_ids=rest, logprobs=[0.0] * len(rest), versions=[0] * len(rest))
    return TrainingSample(
        group, [first], rollout=rollout, advantages=torch.zeros(()), trained=[True] * len(rest)
    )


def text_as_micro_batch(token_ids: list[int], device: torch.device) -> MicroBatch:
    """Returns one row in which every token but the first is a label, at temperature 1."""
    return fill_rows([[PrefixTree([text_sequence(token_ids)])]], temperature=1.0).to(device)


def blank() -> MicroBatch:
    """Returns a micro-batch without a label, for a rank that must take part in a pass."""
    sample = text_sequence([0, 0])
    sample.trained = [False]
    return fill_rows([[PrefixTree([sample])]], temperature=1.0)


def each_rollout(
    group: Group,
    temperature: float,
    micro_batch_tokens: int,
    compute: Callable[[Sequence[MicroBatch]], list[Tensor]],
    attention_tokens: int = 0,
) -> Numbers:
    """Yields each rollout of a group that has a token, with one number for each of its tokens, or N.

    `compute` returns [R, L], or [R, L, N], for each micro-batch of at most `micro_batch_tokens`,
    padding included; a longer rollout gets its own. Without `attention_tokens` no prompt is shared.
    """
    trees = prefix_trees(whole_samples(group), micro_batch_tokens, attention_tokens)
    batches = list(_batches(trees, micro_batch_tokens))
    micros = [fill_rows([[tree] for tree in batch], temperature) for batch in batches]
    samples: list[TrainingSample] = []
    numbers: list[Tensor] = []
    for batch, micro, found in zip(batches, micros, compute(micros), strict=True):
        own = [sample for tree in batch for sample in tree.samples]
        samples += own
        numbers += found[micro.mask].split([sum(sample.trained) for sample in own])
    yield from by_rollout(samples, numbers)


def whole_samples(group: Group) -> list[TrainingSample]:
    """Returns the samples of a group, with every token of each rollout in the mask of one."""
    return [
        sample
        for rollout in group.rollouts
        for sample in samples_of(group, rollout, torch.zeros(()), [True] * len(rollout.token_ids))
    ]


def by_rollout(samples: Sequence[TrainingSample], numbers: Iterable[Tensor]) -> Numbers:
    """Yields each rollout with a number for every token, from `numbers` of its samples' trained
    tokens."""
    filled: dict[int, tuple[Rollout, Tensor]] = {}
    for sample, own in zip(samples, numbers, strict=True):
        empty = torch.zeros(len(sample.rollout.token_ids), *own.shape[1:])
        _, found = filled.setdefault(id(sample.rollout), (sample.rollout, empty))
        found[sample.trained_places] = own.float().cpu()
    yield from filled.values()


def _batches(trees: list[PrefixTree], micro_batch_tokens: int) -> Iterator[list[PrefixTree]]:
    # The longest first: rows of similar length need little padding.
    left = sorted(trees, key=len, reverse=True)
    while left:
        rows = max(1, micro_batch_tokens // len(left[0]))
        yield left[:rows]
        left = left[rows:]


def fill_rows(rows: list[list[PrefixTree]], temperature: float, masks: bool = False) -> MicroBatch:
    """Returns the rows, padded to the longest; with `masks` it always says who reads what."""
    shape = (len(rows), max(sum(map(len, row)) for row in rows))
    samples = [sample for row in rows for tree in row for sample in tree.samples]
    rollouts = [sample.rollout for sample in samples]
    referenced = all(rollout.reference_logprobs is not None for rollout in rollouts)
    valued = all(rollout.returns is not None for rollout in rollouts)
    turns_valued = all(rollout.turn_values is not None for rollout in rollouts)
    masked = masks or any(tree.shared for row in rows for tree in row)
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
        trained_elsewhere=torch.zeros(shape, dtype=torch.int64),
        temperature=temperature,
        readers_end=torch.full(shape, shape[1], dtype=torch.int64) if masked else None,
        reference_logprobs=torch.zeros(shape, dtype=torch.float32) if referenced else None,
        returns=torch.zeros(shape, dtype=torch.float32) if valued else None,
        turn_targets=torch.full((*shape, 5), torch.nan) if turns_valued else None,
        partial=any(sample.partial for sample in samples),
        bounds=_bounds_of(rows, shape[1]),
    )
    order = dict.fromkeys(sample.group for sample in samples)
    groups = {group: number for number, group in enumerate(order)}
    number = 0
    for row, trees in enumerate(rows):
        start = 0
        for tree in trees:
            whole = slice(start, start + len(tree))
            batch.group_ids[row, whole] = groups[tree.group]
            number = _write_tree(batch, row, whole, tree, number=number)
            start = whole.stop
        # Any token pads in most models. But an embedding of zeros, usual for a padding token, has
        # no finite gradient in Gemma 3n.
        batch.input_ids[row, start:] = batch.input_ids[row, start - 1]
        batch.position_ids[row, start:] = torch.arange(shape[1] - start)
    return batch


def _write_tree(batch: MicroBatch, row: int, whole: slice, tree: PrefixTree, number: int) -> int:
    """Numbers the tree's samples from `number`; returns the next number."""
    start = whole.start + tree.shared
    shared = slice(whole.start, start)
    first = tree.samples[0]
    batch.input_ids[row, shared] = batch.labels.new_tensor(first.token_ids[: tree.shared])
    batch.position_ids[row, shared] = torch.arange(tree.shared)
    batch.sequence_ids[row, shared] = number
    if batch.readers_end is not None:
        batch.readers_end[row, shared] = whole.stop
    for sample in tree.samples:
        branch = slice(start, start + len(sample) - tree.shared)
        batch.sequence_ids[row, branch] = number
        if batch.readers_end is not None:
            batch.readers_end[row, branch] = branch.stop
        _write(batch, row, branch, sample, shared=tree.shared)
        start = branch.stop
        number += 1
    return number


def _write(batch: MicroBatch, row: int, branch: slice, sample: TrainingSample, shared: int) -> None:
    """Writes a sample without its first `shared` tokens."""
    rollout, tokens = sample.rollout, sample.token_ids
    batch.input_ids[row, branch] = batch.labels.new_tensor(tokens[shared:])
    batch.position_ids[row, branch] = torch.arange(shared, len(sample))
    # A response token is the label of the position before it, so the first one belongs to the end
    # of the prompt. That position may be in the shared tokens, if its label is not trained.
    first = branch.start - shared + len(sample.prompt) - 1
    trained = batch.mask.new_tensor(sample.trained)
    columns = torch.arange(first, first + len(trained))[trained]
    places = sample.trained_places
    batch.mask[row, columns] = True
    batch.labels[row, columns] = batch.labels.new_tensor(tokens[len(sample.prompt) :])[trained]
    batch.advantages[row, columns] = sample.advantages.expand(len(rollout.token_ids))[places]
    batch.versions[row, columns] = batch.versions.new_tensor(rollout.versions)[places]
    batch.trained_elsewhere[row, columns] = sample.trained_elsewhere
    if batch.turn_targets is not None:
        batch.turn_targets[row, columns] = _turn_targets(rollout)[places]
    for field, numbers in (
        (batch.behaviour_logprobs, rollout.logprobs),
        (batch.reference_logprobs, rollout.reference_logprobs),
        (batch.returns, rollout.returns),
    ):
        if field is not None:
            field[row, columns] = field.new_tensor(numbers)[places]


def _turn_targets(rollout: Rollout) -> Tensor:
    """Returns `MicroBatch.turn_targets` of a rollout's tokens: float32 [tokens, 5]."""
    found = torch.full((len(rollout.token_ids), 5), torch.nan)
    for turn, values in zip(rollout.turns, rollout.turn_values or (), strict=True):
        of_state, of_action = values.targets[:2], values.targets[2:]
        found[turn.start, [0, 1, 4]] = torch.tensor([*of_state, values.to_go])
        found[turn.stop - 1, [2, 3]] = torch.tensor(of_action)
    return found


def _bounds_of(rows: list[list[PrefixTree]], length: int) -> SequenceBounds:
    """Returns the bounds of the sequences in rows of `length` tokens."""
    sequences: list[tuple[Tensor, Tensor]] = []  # places of its tokens, and of those that it reads
    for row, trees in enumerate(rows):
        start = row * length
        for tree in trees:
            shared = torch.arange(start, start + tree.shared)
            if tree.shared:
                sequences.append((shared, shared))
            start += tree.shared
            for sample in tree.samples:
                own = torch.arange(start, start + len(sample) - tree.shared)
                sequences.append((own, torch.cat([shared, own])))
                start += len(own)
        padding = torch.arange(start, (row + 1) * length)
        if len(padding):
            sequences.append((padding, padding))
    queries, keys = zip(*sequences, strict=True)
    shares = any(tree.shared for trees in rows for tree in trees)
    return SequenceBounds(
        queries=_ends(queries),
        keys=_ends(keys),
        longest_query=max(map(len, queries)),
        longest_key=max(map(len, keys)),
        key_places=torch.cat(keys).int() if shares else None,
    )


def _ends(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *accumulate(map(len, parts))], dtype=torch.int32)


class _Tried(Exception):
    pass


class _MadeUpStep:
    """A right and a wrong response, in one micro-batch. It ends behind their gradient, because an
    optimizer step would count as a version."""

    num_tokens = 4
    num_sequences = 2

    def __iter__(self) -> Iterator[MicroBatch]:
        right, wrong = text_sequence([1, 1, 2]), text_sequence([1, 1, 2])
        for sample, advantage in (right, 1.0), (wrong, -1.0):
            sample.advantages = torch.tensor(advantage)
            sample.rollout.reference_logprobs = sample.rollout.logprobs
        yield fill_rows([[PrefixTree([right])], [PrefixTree([wrong])]], temperature=1.0)
        raise _Tried

    def finish(self) -> NoReturn:
        raise _Tried


def try_step(train: Callable[[Step, int], object]) -> None:
    """Calls `training_step` with a made-up step."""
    with suppress(_Tried):
        train(_MadeUpStep(), 0)
