"""Run-length encoded lists: the tokens, log-probs and versions of a simulated rollout.

A list of 20,000 versions would take 160 kB; run-length encoded they take a few hundred bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, TypeVar

from lrl.types import Rollout

V = TypeVar("V", int, float)


class RunLengths(Sequence[V]):
    """A run-length encoded list: (value, how often in a row), in order. It grows by `+=`, as a list
    does, and by whole lists."""

    __slots__ = ("runs", "_length")

    def __init__(self, runs: Iterable[tuple[V, int]] = ()) -> None:
        self.runs: list[tuple[V, int]] = [(value, count) for value, count in runs if count]
        self._length: int = sum(count for _, count in self.runs)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[V]:
        return (value for value, count in self.runs for _ in range(count))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(self._length)[index]
        for value, count in self.runs:
            if place < count:
                return value
            place -= count
        raise AssertionError("the runs are shorter than their sum")

    def __add__(self, other: Any) -> Any:
        """Returns both, one after the other."""
        if not isinstance(other, RunLengths):
            other = RunLengths((value, len(list(equal))) for value, equal in groupby(other))
        return RunLengths(chain(self.runs, other.runs))

    def count(self, value: Any) -> int:
        """Returns how often `value` is in the list, without unrolling it."""
        return sum(count for one, count in self.runs if one == value)


def begin(rollout: Rollout) -> None:
    """Makes the lists of a rollout without a token run-length encoded ones."""
    for name in ("token_ids", "logprobs", "versions"):
        setattr(rollout, name, RunLengths())


def fill(rollout: Rollout, versions: Sequence[tuple[int, int]], token: int = 0) -> None:
    """Finishes an empty rollout with the same token everywhere, log-probs of 0, and `versions`:
    (version, tokens) in order."""
    written: Any = RunLengths(versions)
    rollout.token_ids = RunLengths([(token, len(written))])  # type: ignore[assignment]
    rollout.versions = written
    rollout.logprobs = RunLengths([(0.0, len(written))])  # type: ignore[assignment]
    rollout.finish_reason = "stop"
