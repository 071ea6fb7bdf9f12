"""Counts of what seldom happens: they are charts only in a run in which it has happened."""

from __future__ import annotations

from collections.abc import Mapping


class NonzeroCounts:
    """Leaves a count out until it is not zero for the first time; from then on every step has its value, zeros too.

    So a chart that is there has something to show, and no gaps. Who reads such a count takes an absent one for zero.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def to_log(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Those of a step's counts, by their tags, that were not zero in this step or one before."""
        self._seen |= {tag for tag, count in counts.items() if count}
        return {tag: float(count) for tag, count in counts.items() if tag in self._seen}
