"""Ranks of one process: a thread each, with queues in the place of gloo."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lrl.system.ranks import Ranks

T = TypeVar("T")


class ThreadedRanks(Ranks):
    """One of them."""

    def __init__(
        self, rank: int, pipes: Sequence[tuple[queue.Queue[Any], queue.Queue[Any]]]
    ) -> None:
        super().__init__()
        self.rank = rank
        self.size = len(pipes)
        self._pipes = pipes

    def share(self, what: Any) -> Any:
        if self.rank:
            return self._pipes[self.rank][0].get(timeout=300)
        for down, _ in self._pipes[1:]:
            down.put(what)
        return what

    def gather(self, part: Any) -> list[Any]:
        if self.rank:
            self._pipes[self.rank][1].put(part)
            return []
        return [part, *(up.get(timeout=300) for _, up in self._pipes[1:])]


def threaded_ranks(size: int) -> list[Ranks]:
    pipes = [(queue.Queue[Any](), queue.Queue[Any]()) for _ in range(size)]
    return [ThreadedRanks(rank, pipes) for rank in range(size)]


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Runs `work` on as many ranks at once; returns the result of each."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, threaded_ranks(size)))
