"""Bin packing: which sequences share a micro-batch, and which a row. It reads only their lengths
and groups.

A row is as long as the longest sequence of its round, and shorter sequences share rows by best-fit
decreasing; a model in which the sequences of one row would see each other gets one row a sequence.
A round is a micro-batch for each rank. It is made as soon as the waiting sequences fill the token
budgets of all ranks; it takes the longest ones, and leaves the shortest, which fit anywhere, for
later. With whole groups a round takes as many groups as fit the budgets, and at least one.

Ranks work at the same time and wait for one another at the end of a step, so they get equal work:
none has more rows of a round than an equal share, rounded up, and the sums of squared lengths,
which are the cost of attention, become equal.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Packable(Protocol):
    """A prompt and its response."""

    @property
    def group(self) -> int:
        """`Group.index`."""

    def __len__(self) -> int: ...


P = TypeVar("P", bound=Packable)
Rows = list[list[P]]
"""Rows of one micro-batch; none for a rank that gets none."""


class BinPacker(Generic[P]):
    """Sequences that wait to become micro-batches.

    Args:
        micro_batch_tokens: Budget of a micro-batch: rows x row length, padding included. A single
            longer sequence gets a micro-batch of its own.
        whole_groups: Whether all sequences of a group go into one micro-batch, whatever its size.
        ranks: Micro-batches that are trained at the same time.
        share_rows: Whether several sequences may lie in one row.
    """

    def __init__(
        self,
        micro_batch_tokens: int,
        whole_groups: bool = False,
        ranks: int = 1,
        share_rows: bool = True,
    ) -> None:
        self.micro_batch_tokens = micro_batch_tokens
        self.whole_groups = whole_groups
        self.share_rows = share_rows
        self.squares = [0] * ranks
        """Sum of the squared lengths of each rank's sequences so far."""
        self._waiting: list[P] = []

    def add(self, sequence: P) -> None:
        self._waiting.append(sequence)

    def full(self) -> Iterator[list[Rows[P]]]:
        """Yields each full round as the rows of every rank; rounds that are not taken stay."""
        while sum(map(len, self._waiting)) >= self.budget:
            yield self._round()

    def flush(self) -> Iterator[list[Rows[P]]]:
        """Yields the rounds of all sequences that still wait."""
        while self._waiting:
            yield self._round()

    @property
    def budget(self) -> int:
        """Tokens that fill a round."""
        return self.micro_batch_tokens * len(self.squares)

    def _round(self) -> list[Rows[P]]:
        if self.whole_groups:
            groups = self._first_groups()
            shares = self._divide(groups, most=len(groups))
            sequences = [[sequence for group in share for sequence in group] for share in shares]
            return [self._fit(each, max_rows=len(each))[0] for each in sequences]
        most = max(1, self.micro_batch_tokens // max(map(len, self._waiting)))
        rows, self._waiting = self._fit(self._waiting, max_rows=most * len(self.squares))
        return self._divide(rows, most=-(-len(rows) // len(self.squares)))

    def _divide(self, parts: list[list[P]], most: int) -> list[list[list[P]]]:
        """Divides `parts` among the ranks, at most `most` each: the heaviest first, to the rank
        with the least work."""
        shares: list[list[list[P]]] = [[] for _ in self.squares]
        for part in sorted(parts, key=_squares, reverse=True):
            free = [rank for rank, share in enumerate(shares) if len(share) < most]
            rank = min(free, key=self.squares.__getitem__)
            shares[rank].append(part)
            self.squares[rank] += _squares(part)
        return shares

    def _first_groups(self) -> list[list[P]]:
        """Takes the oldest waiting groups that fit the budgets together, at least one."""
        groups: dict[int, list[P]] = {}
        for sequence in self._waiting:
            groups.setdefault(sequence.group, []).append(sequence)
        chosen, taken = list[list[P]](), list[P]()
        for members in groups.values():
            taken += members
            # In shared rows only the tokens are counted, as if there were no padding.
            tokens = sum(map(len, taken)) if self.share_rows else len(taken) * max(map(len, taken))
            if chosen and tokens > self.budget:
                break
            chosen.append(members)
        self._waiting = [
            sequence for members in list(groups.values())[len(chosen) :] for sequence in members
        ]
        return chosen

    def _fit(self, sequences: list[P], max_rows: int) -> tuple[Rows[P], list[P]]:
        """Returns at most `max_rows` rows as long as the longest sequence, and the sequences that
        did not fit."""
        ordered = sorted(sequences, key=len, reverse=True)
        if self.share_rows and ordered:
            return _best_fit(ordered, max_rows)
        return [[sequence] for sequence in ordered[:max_rows]], ordered[max_rows:]


def _squares(sequences: list[P]) -> int:
    return sum(len(sequence) ** 2 for sequence in sequences)


def _best_fit(ordered: list[P], max_rows: int) -> tuple[Rows[P], list[P]]:
    """Packs by best-fit decreasing into at most `max_rows` rows as long as the first sequence, the
    longest."""
    length = len(ordered[0])
    rows: Rows[P] = []
    # (free tokens, row), sorted: the first that is large enough fits best.
    free: list[tuple[int, int]] = []
    left = []
    for sequence in ordered:
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
    return rows, left
