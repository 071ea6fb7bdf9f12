"""Samples of a group read their first tokens once, and each reads what it would read alone."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.training.collate import fill_rows
from lrl.training.prefix_tree import TrainingSample, prefix_trees
from lrl.types import ENVIRONMENT, MicroBatch, Rollout

ATTENTION_TOKENS = 1536
"""Of a hidden state of 256."""

groups_of_lengths = st.lists(
    st.tuples(
        st.integers(1, 20), st.integers(0, 6), st.lists(st.integers(1, 12), min_size=1, max_size=6)
    ),
    min_size=1,
    max_size=4,
)


def sample(
    prompt: list[int], response: list[int], observation: int = 0, group: int = 0
) -> TrainingSample:
    """A response of which the first `observation` tokens are an environment's."""
    versions = [ENVIRONMENT] * observation + [0] * (len(response) - observation)
    rollout = Rollout(token_ids=response, logprobs=[-0.5] * len(response), versions=versions)
    return TrainingSample(
        group,
        prompt,
        rollout=rollout,
        advantages=torch.arange(len(response)).float(),
        trained=rollout.mask,
    )


def drawn(number: int, prompt: int, observation: int, lengths: list[int]) -> list[TrainingSample]:
    """Samples of a group with the same opening."""
    draw = random.Random(number)
    tokens = [draw.randrange(1, 50) for _ in range(prompt)]
    opening = [draw.randrange(1, 50) for _ in range(observation)]
    return [
        sample(
            tokens, opening + [draw.randrange(1, 50) for _ in range(length)], observation, number
        )
        for length in lengths
    ]


def read_by(micro: MicroBatch, row: int, reader: int) -> tuple[list[int], list[int]]:
    """Tokens that a token reads, itself included, and their positions."""
    assert micro.readers_end is not None
    places = [at for at in range(reader + 1) if reader < micro.readers_end[row, at]]
    return micro.input_ids[row, places].tolist(), micro.position_ids[row, places].tolist()


@settings(max_examples=60)
@given(groups_of_lengths, st.integers(1, 60), st.integers(1, 200))
def test_every_label_reads_its_own_sample_and_nothing_else(
    shapes: list, longest: int, attention_tokens: int
) -> None:
    groups = [drawn(number, *shape) for number, shape in enumerate(shapes)]
    trees = [tree for group in groups for tree in prefix_trees(group, longest, attention_tokens)]
    kept = [one for tree in trees for one in tree.samples]
    assert sorted(map(id, kept)) == sorted(id(one) for group in groups for one in group)
    assert all(len(tree) <= longest or len(tree.samples) == 1 for tree in trees)
    rows = [trees[::2], trees[1::2]] if len(trees) > 1 else [trees]
    micro = fill_rows(rows, temperature=1.0)
    assert micro.lengths == [len(tree) for row in rows for tree in row]
    if micro.readers_end is None:
        assert not any(tree.shared for tree in trees)
        return
    ordered = [one for row in rows for tree in row for one in tree.samples]
    assert micro.num_sequences == len(ordered)
    for number, one in enumerate(ordered):
        here = (micro.sequence_ids == number) & micro.mask
        own = one.rollout.mask
        labels = [token for token, mine in zip(one.rollout.token_ids, own, strict=True) if mine]
        assert micro.labels[here].tolist() == labels
        assert micro.advantages[here].tolist() == one.advantages[torch.tensor(own)].tolist()
        first = len(one.token_ids) - len(labels)
        for count, (row, reader) in enumerate(here.nonzero().tolist()):
            tokens, positions = read_by(micro, row, reader)
            assert tokens == one.token_ids[: first + count]
            assert positions == list(range(first + count))


def test_what_all_have_and_none_is_trained_on_is_shared() -> None:
    """The prompt without its last token, and an opening that all episodes have."""
    samples = [sample([1, 2, 3], [7, 8, 9]), sample([1, 2, 3], [7, 8, 4])]
    (tree,) = prefix_trees(samples, longest=100, attention_tokens=10_000)
    assert tree.shared == 2 and len(tree) == 2 + 4 + 4
    samples = [sample([1, 2], [5, 6, 7], 2), sample([1, 2], [5, 6, 8, 9], 2)]
    (tree,) = prefix_trees(samples, longest=100, attention_tokens=10_000)
    assert tree.shared == 3


@pytest.mark.parametrize(
    ("prompt", "response", "attention_tokens", "trees"),
    [
        (100, 10, 10_000, 1),
        (100, 100, 3000, 4),
        (300, 1000, 3456, 16),
        (4, 64, 1536, 16),
        (2, 1000, 2000, 16),
        (100, 10, 0, 16),
    ],
)
def test_trees_are_as_large_as_attention_allows(
    prompt: int, response: int, attention_tokens: int, trees: int
) -> None:
    samples = drawn(0, prompt, 0, [response] * 16)
    found = prefix_trees(samples, 100_000, attention_tokens)
    assert len(found) == trees
