"""Bin packing for several ranks.

Covers lrl/rollouts/packing.py.
"""

import math
import random
from dataclasses import dataclass
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrl.rollouts.packing import BinPacker, Rows


@dataclass(eq=False)
class Piece:
    group: int
    tokens: int

    def __len__(self) -> int:
        return self.tokens


def pack(packer: BinPacker[Piece], pieces: list[Piece]) -> list[list[Rows[Piece]]]:
    rounds = []
    for _, members in groupby(pieces, key=lambda piece: piece.group):  # a group arrives whole
        for piece in members:
            packer.add(piece)
        rounds += list(packer.full())
    return rounds + list(packer.flush())


def long_tailed(count: int, seed: int) -> list[Piece]:
    draw = random.Random(seed)
    return [
        Piece(number // 8, min(1024, 1 + int(draw.lognormvariate(4.5, 1.0))))
        for number in range(count)
    ]


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
    rounds = pack(BinPacker(budget, whole_groups, ranks, share_rows), pieces)
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


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_get_equal_work_by_tokens_squared(ranks: int, seed: int) -> None:
    pieces = long_tailed(128 * ranks, seed)
    packer = BinPacker[Piece](4096, ranks=ranks)
    rounds = pack(packer, pieces)
    assert len(rounds) > 2
    longest = max(map(len, pieces))
    assert max(packer.squares) - min(packer.squares) <= longest**2, "a row cannot be split"
    dealt = [sum(len(piece) ** 2 for piece in pieces[rank::ranks]) for rank in range(ranks)]
    mean = sum(dealt) / ranks
    assert max(packer.squares) - mean < 0.5 * (max(dealt) - mean)


def test_micro_batches_of_one_sequence_a_row_have_similar_lengths() -> None:
    pieces = [Piece(number, tokens) for number, tokens in enumerate([90, 3, 88, 4, 5, 86])]
    (first, second) = pack(BinPacker(270, share_rows=False), pieces)
    assert [len(row[0]) for row in first[0]] == [90, 88, 86]
    assert [len(row[0]) for row in second[0]] == [5, 4, 3]
