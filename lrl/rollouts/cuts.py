"""Which sequences become a micro-batch together, and which of them share a row. Only their lengths and groups count.

A row is as long as the micro-batch's longest sequence, and shorter ones share rows by best-fit decreasing. A
micro-batch is cut as soon as what waits holds a whole budget of tokens; each cut takes the longest, and leaves the
shortest, which fit anywhere, for later. With whole groups a cut takes as many of them as fit the budget, and at least
one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Piece(Protocol):
    """A prompt and its answer."""

    @property
    def group(self) -> int:
        """`Group.index`."""

    def __len__(self) -> int: ...


P = TypeVar("P", bound=Piece)
Rows = list[list[P]]


class Cuts(Generic[P]):
    """Sequences that wait to be cut into micro-batches.

    Args:
        micro_batch_tokens: Budget of a micro-batch: rows x row length, padding included. A single longer sequence gets
            a micro-batch of its own.
        whole_groups: Whether all sequences of a group go into one micro-batch, whatever its size.

    Raises:
        ValueError: micro_batch_tokens is not above 0.
    """

    def __init__(self, micro_batch_tokens: int, whole_groups: bool = False) -> None:
        if micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens={micro_batch_tokens}: the budget must be at least 1 token")
        self.micro_batch_tokens = micro_batch_tokens
        self.whole_groups = whole_groups
        self._waiting: list[P] = []

    def take(self, piece: P) -> None:
        """`piece` waits from now on."""
        self._waiting.append(piece)

    def full(self) -> Iterator[Rows[P]]:
        """The rows of each micro-batch that is full by now; what is not taken from the iterator stays."""
        while sum(map(len, self._waiting)) >= self.micro_batch_tokens:
            yield self._cut()

    def flush(self) -> Iterator[Rows[P]]:
        """The rows of the micro-batches of all that still waits."""
        while self._waiting:
            yield self._cut()

    def _cut(self) -> Rows[P]:
        if self.whole_groups:
            chosen, self._waiting = self._first_groups()
            rows, _ = _best_fit(chosen, max_rows=len(chosen))
        else:
            longest = max(map(len, self._waiting))
            rows, self._waiting = _best_fit(self._waiting, max_rows=max(1, self.micro_batch_tokens // longest))
        return rows

    def _first_groups(self) -> tuple[list[P], list[P]]:
        """The waiting groups that fit the budget together, at least one, and the rest; first come, first cut."""
        chosen: list[P] = []
        groups = dict.fromkeys(piece.group for piece in self._waiting)
        for group in groups:
            members = [piece for piece in self._waiting if piece.group == group]
            if chosen and sum(map(len, chosen + members)) > self.micro_batch_tokens:
                break
            chosen += members
        taken = {piece.group for piece in chosen}
        return chosen, [piece for piece in self._waiting if piece.group not in taken]


def _best_fit(pieces: list[P], max_rows: int) -> tuple[Rows[P], list[P]]:
    """Best-fit decreasing into at most `max_rows` rows as long as the longest; the rows, and what did not fit."""
    ordered = sorted(pieces, key=len, reverse=True)
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
