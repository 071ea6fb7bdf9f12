"""Which sequences become a micro-batch together, and which of them share a row. Only their lengths and groups count.

A row is as long as the cut's longest sequence, and shorter ones share rows by best-fit decreasing; where sequences of
one row would see each other, each has a row of its own. A cut makes a micro-batch for each rank, as soon as what waits
holds a whole budget of tokens for each; it takes the longest, and leaves the shortest, which fit anywhere, for later.
With whole groups a cut takes as many of them as fit the budgets, and at least one.

Ranks work at the same time and wait for one another at the end of a step, so they get equal work: none has more rows of
a cut than an equal share, rounded up, and each the ones that make the sums of squared lengths equal, which is what
attention costs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Piece(Protocol):
    """A prompt and its response."""

    @property
    def group(self) -> int:
        """`Group.index`."""

    def __len__(self) -> int: ...


P = TypeVar("P", bound=Piece)
Rows = list[list[P]]
"""Of a micro-batch; none for a rank that gets none."""


class Cuts(Generic[P]):
    """Sequences that wait to be cut into micro-batches.

    Args:
        micro_batch_tokens: Budget of a micro-batch: rows x row length, padding included. A single longer sequence gets
            a micro-batch of its own.
        whole_groups: Whether all sequences of a group go into one micro-batch, whatever its size.
        ranks: How many micro-batches are trained at the same time.
        share_rows: Whether several sequences may lie in one row.

    Raises:
        ValueError: micro_batch_tokens is not above 0.
    """

    def __init__(
        self, micro_batch_tokens: int, whole_groups: bool = False, ranks: int = 1, share_rows: bool = True
    ) -> None:
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens={micro_batch_tokens}: the budget must be at least 1 token")
        self.micro_batch_tokens = micro_batch_tokens
        self.whole_groups = whole_groups
        self.share_rows = share_rows
        self.squares = [0] * ranks
        """Tokens squared, summed over the sequences that each rank has got."""
        self._waiting: list[P] = []

    def take(self, piece: P) -> None:
        """`piece` waits from now on."""
        self._waiting.append(piece)

    def full(self) -> Iterator[list[Rows[P]]]:
        """Each cut that is full by now, as the rows of every rank; what is not taken from the iterator stays."""
        while sum(map(len, self._waiting)) >= self.budget:
            yield self._cut()

    def flush(self) -> Iterator[list[Rows[P]]]:
        """The cuts of all that still waits."""
        while self._waiting:
            yield self._cut()

    @property
    def budget(self) -> int:
        """Tokens that make a cut full."""
        return self.micro_batch_tokens * len(self.squares)

    def _cut(self) -> list[Rows[P]]:
        if self.whole_groups:
            groups, self._waiting = self._first_groups()
            shares = self._share_out(groups, most=len(groups))
            return [self._rows_of([piece for group in share for piece in group]) for share in shares]
        longest = max(map(len, self._waiting))
        most = max(1, self.micro_batch_tokens // longest)
        rows, self._waiting = self._fit(self._waiting, max_rows=most * len(self.squares))
        return self._share_out(rows, most=-(-len(rows) // len(self.squares)))

    def _share_out(self, parts: list[list[P]], most: int) -> list[list[list[P]]]:
        """What of `parts` each rank gets, at most `most` of them: the heaviest first, to who has got the least."""
        shares: list[list[list[P]]] = [[] for _ in self.squares]
        for part in sorted(parts, key=_squares, reverse=True):
            free = [rank for rank, share in enumerate(shares) if len(share) < most]
            rank = min(free, key=self.squares.__getitem__)
            shares[rank].append(part)
            self.squares[rank] += _squares(part)
        return shares

    def _first_groups(self) -> tuple[list[list[P]], list[P]]:
        """The waiting groups that fit the budgets together, at least one, and the rest; first come, first cut.

        Of groups whose sequences share rows only the tokens are counted, as if there were no padding.
        """
        groups: dict[int, list[P]] = {}
        for piece in self._waiting:
            groups.setdefault(piece.group, []).append(piece)
        chosen, taken = list[list[P]](), list[P]()
        for members in groups.values():
            taken += members
            tokens = sum(map(len, taken)) if self.share_rows else len(taken) * max(map(len, taken))
            if chosen and tokens > self.budget:
                break
            chosen.append(members)
        return chosen, [piece for members in list(groups.values())[len(chosen) :] for piece in members]

    def _rows_of(self, pieces: list[P]) -> Rows[P]:
        """Rows for all of them."""
        return self._fit(pieces, max_rows=len(pieces))[0] if pieces else []

    def _fit(self, pieces: list[P], max_rows: int) -> tuple[Rows[P], list[P]]:
        """At most `max_rows` rows as long as the longest of the pieces; the rows, and what did not fit."""
        ordered = sorted(pieces, key=len, reverse=True)
        if self.share_rows:
            return _best_fit(ordered, max_rows)
        return [[piece] for piece in ordered[:max_rows]], ordered[max_rows:]


def _squares(pieces: list[P]) -> int:
    return sum(len(piece) ** 2 for piece in pieces)


def _best_fit(ordered: list[P], max_rows: int) -> tuple[Rows[P], list[P]]:
    """Best-fit decreasing into at most `max_rows` rows as long as the first, which is the longest."""
    length = len(ordered[0])
    rows: Rows[P] = []
    free: list[tuple[int, int]] = []  # (free tokens, row), sorted: the first that is large enough fits best
    left = []
    for piece in ordered:
        best = bisect_left(free, (len(piece), 0))
        if best < len(free):
            space, row = free.pop(best)
        elif len(rows) < max_rows:
            space, row = length, len(rows)
            rows.append([])
        else:
            left.append(piece)
            continue
        rows[row].append(piece)
        insort(free, (space - len(piece), row))
    return rows, left
