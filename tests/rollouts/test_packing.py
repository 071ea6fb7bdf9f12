"""Packing of groups into micro-batches, also for several ranks."""

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.advantages import GroupMean
from lrl.rollouts.ledger import load_group, save_group
from lrl.rollouts.packing import BinPacker, Packer
from lrl.types import ENVIRONMENT, Group, MicroBatch, Rollout, Turn
from tests import made
from tests.policies import packed


def make_group(index: int, prompt_tokens: int, responses: list[int]) -> Group:
    rng = random.Random(index)

    def response(n: int) -> Rollout:
        token_ids = [rng.randrange(1, 32) for _ in range(n)]
        logprobs = [-rng.random() for _ in range(n)]
        versions = sorted(rng.randrange(4) for _ in range(n))
        return made.rollout(token_ids, rng.random(), logprobs=logprobs, versions=versions)

    rollouts = [response(n) for n in responses]
    prompt = [rng.randrange(1, 32) for _ in range(prompt_tokens)]
    return made.group(index, *rollouts, prompt=prompt)


drawn_groups = st.lists(
    st.tuples(st.integers(1, 8), st.lists(st.integers(1, 30), min_size=2, max_size=5)),
    min_size=1,
    max_size=8,
).map(lambda shapes: [make_group(index, *shape) for index, shape in enumerate(shapes)])


def unpack(batches: list[MicroBatch]) -> list[tuple]:
    """Every packed rollout as (tokens, label, behaviour log-prob, version, advantage per trained
    token), sorted."""
    found = []
    for batch in batches:
        for number in range(batch.num_sequences):
            here = batch.sequence_ids == number
            trained = here & batch.mask
            fields = (batch.labels, batch.behaviour_logprobs, batch.versions, batch.advantages)
            found.append(
                (batch.input_ids[here].tolist(), *(field[trained].tolist() for field in fields))
            )
    return sorted(found)


class PerToken(GroupMean):
    """Adds the place in the response to each advantage."""

    def of(self, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        return [
            found + torch.arange(len(one.token_ids))
            for found, one in zip(super().of(rollouts), rollouts, strict=True)
        ]


def expected(groups: list[Group], oldest: int = 0) -> list[tuple]:
    found = []
    for group in groups:
        mean = torch.tensor([rollout.reward for rollout in group.rollouts]).mean()
        for rollout in group.rollouts:
            kept = [i for i, version in enumerate(rollout.versions) if version >= oldest]
            fields = (rollout.token_ids, torch.tensor(rollout.logprobs).tolist(), rollout.versions)
            advantages = [(torch.tensor(rollout.reward) - mean).item() + i for i in kept]
            if kept:
                tokens = group.prompt.token_ids + rollout.token_ids
                found.append((tokens, *([field[i] for i in kept] for field in fields), advantages))
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(
    drawn_groups,
    st.integers(1, 120),
    st.integers(0, 4),
    st.booleans(),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_response_is_packed_once_and_whole(
    groups: list[Group], budget: int, oldest: int, share_rows: bool, ranks: int, whole_groups: bool
) -> None:
    layout: Any = {"share_rows": share_rows, "data_parallel_size": ranks}
    layout |= {"whole_groups": whole_groups, "oldest_version": oldest}
    packer = Packer(budget, PerToken(), 0.7, **layout)
    batches = packed(packer, groups)
    for got, wanted in zip(unpack(batches), expected(groups, oldest), strict=True):
        assert got[:4] == wanted[:4]
        assert got[4] == pytest.approx(wanted[4], abs=1e-5)
    for batch in batches:
        assert batch.temperature == 0.7
        out = ~batch.mask
        for field in (batch.labels, batch.behaviour_logprobs, batch.advantages, batch.versions + 1):
            assert not field[out].any(), "outside the mask nothing is left"
        rows, columns = batch.mask.nonzero(as_tuple=True)
        assert torch.equal(batch.input_ids[rows, columns + 1], batch.labels[rows, columns])
    everything = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    assert packer.tokens == sum(batch.num_tokens for batch in batches)
    assert packer.tokens + packer.masked_tokens == everything
    if whole_groups:
        trained = [group for group in groups if expected([group], oldest)]
        assert sum(int(batch.group_ids.max()) + 1 for batch in batches) == len(trained)


@pytest.mark.parametrize(("unscored", "counts"), [(1, (1, [], 8)), (2, (3, [7], 0))])
def test_a_response_without_a_reward_or_a_baseline_is_counted_and_left_out(
    unscored: int, counts: tuple[int, list[int], int]
) -> None:
    group = make_group(7, 2, [4, 3, 5])
    for rollout in group.rollouts[:unscored]:
        rollout.reward = None
    packer = Packer(100, GroupMean(), 1.0)
    batches = packed(packer, [group])
    assert (packer.discarded_rollouts, packer.discarded_groups, packer.tokens) == counts
    assert sum(batch.num_sequences for batch in batches) == (2 if unscored == 1 else 0)


def test_a_cut_response_moves_the_baseline_and_has_no_token_in_the_loss() -> None:
    group = make_group(0, 2, [3, 4, 5])
    group.rollouts[1].finish_reason = "length"
    packer = Packer(100, GroupMean(), 1.0, mask_truncated=True)
    batches = packed(packer, [group])
    assert unpack(batches) == sorted(
        row for row in unpack(packed(Packer(100, GroupMean(), 1.0), [group])) if len(row[1]) != 4
    )
    assert (packer.tokens, packer.sequences) == (8, 2)
    assert (packer.masked_tokens, packer.discarded_rollouts) == (4, 0)


def test_a_token_of_the_environment_is_context_without_loss_lag_or_place_in_the_denominator() -> (
    None
):
    group = make_group(0, 3, [7, 5])
    first = group.rollouts[0]
    assert first.turns == [Turn(0, 7)] and all(first.mask) and Rollout().turns == []
    alone = packed(Packer(64, GroupMean(), 1.0), [copy.deepcopy(group)])
    first.versions[2:4], first.logprobs[2:4] = [ENVIRONMENT] * 2, [0.0] * 2
    first.turn_ends = [2, 7]
    assert first.turns == [Turn(0, 2), Turn(4, 7)]
    assert first.mask == [True] * 2 + [False] * 2 + [True] * 3
    assert group.num_tokens == 10 and group.oldest_version == min(
        first.policy_versions + group.rollouts[1].versions
    )
    packer = Packer(64, GroupMean(), 1.0)
    (micro,) = packed(packer, [group])
    assert packer.tokens == int(micro.mask.sum()) == 10 and packer.masked_tokens == 0
    assert torch.equal(micro.input_ids, alone[0].input_ids), (
        "the policy reads what the environment wrote"
    )
    left_out = alone[0].mask & ~micro.mask
    assert left_out.sum() == 2 and (micro.versions[left_out] == -1).all()
    assert not micro.advantages[left_out].any()
    assert first.turns == load_group(save_group(group, scored=True), group.prompt).rollouts[0].turns


@dataclass(eq=False)
class Piece:
    group: int
    tokens: int

    def __len__(self) -> int:
        return self.tokens


def pack_pieces(packer: Any, pieces: list[Piece]) -> list[list[list[list[Piece]]]]:
    rounds = []
    for _, members in groupby(pieces, key=lambda piece: piece.group):  # a group arrives whole
        for piece in members:
            packer.add(piece)
        rounds += list(packer.full())
    return rounds + list(packer.flush())


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=60),
    st.integers(1, 120),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_every_sequence_goes_to_one_rank_and_no_rank_has_more_rows_than_its_budget_holds(
    shapes: list[tuple[int, int]], budget: int, ranks: int, whole_groups: bool, share_rows: bool
) -> None:
    pieces = [Piece(group, tokens) for group, tokens in sorted(shapes)]
    rounds = pack_pieces(BinPacker(budget, whole_groups, ranks, share_rows), pieces)
    got = [piece for each in rounds for rows in each for row in rows for piece in row]
    assert sorted(map(id, got)) == sorted(map(id, pieces))
    for each in rounds:
        assert len(each) == ranks and any(each)
        rows = [row for share in each for row in share]
        most, length = max(map(len, each)), max(sum(map(len, row)) for row in rows)
        assert share_rows or all(len(row) == 1 for row in rows)
        if not whole_groups:
            assert most * length <= budget or most == 1
            assert most == math.ceil(len(rows) / ranks)
        elif not share_rows:
            alone = len({row[0].group for row in rows}) == 1
            assert len(rows) * length <= budget * ranks or alone
    if whole_groups:
        places = {
            (piece.group, number, rank)
            for number, each in enumerate(rounds)
            for rank, rows in enumerate(each)
            for row in rows
            for piece in row
        }
        assert len(places) == len({piece.group for piece in pieces})


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_get_equal_work_by_tokens_squared(ranks: int) -> None:
    draw = random.Random(0)
    pieces = [
        Piece(number // 8, min(1024, 1 + int(draw.lognormvariate(4.5, 1.0))))
        for number in range(128 * ranks)
    ]
    packer = BinPacker(4096, ranks=ranks)
    rounds = pack_pieces(packer, pieces)
    assert len(rounds) > 2
    longest = max(map(len, pieces))
    assert max(packer.squares) - min(packer.squares) <= longest**2, "a row cannot be split"
    dealt = [sum(len(piece) ** 2 for piece in pieces[rank::ranks]) for rank in range(ranks)]
    mean = sum(dealt) / ranks
    assert max(packer.squares) - mean < 0.5 * (max(dealt) - mean)
