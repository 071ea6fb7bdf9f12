"""Ranks of one process: a thread each, with queues in the place of gloo."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lrl.system.ranks import Ranks

T = TypeVar("T")
Pipes = list[list[queue.Queue[Any]]]


class ThreadedRanks(Ranks):
    """One of them; `pipes` lead from each rank to each."""

    def __init__(self, rank: int, pipes: Pipes) -> None:
        super().__init__()
        self.rank = rank
        self.size = len(pipes)
        self._pipes = pipes

    def receive(self, rank: int = 0) -> Any:
        return self._pipes[rank][self.rank].get(timeout=300)

    def _send(self, part: Any, rank: int) -> None:
        self._pipes[self.rank][rank].put(part)


def threaded_ranks(size: int) -> list[ThreadedRanks]:
    pipes: Pipes = [[queue.Queue() for _ in range(size)] for _ in range(size)]
    return [ThreadedRanks(rank, pipes) for rank in range(size)]


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Runs `work` on as many ranks at once; returns the result of each."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, threaded_ranks(size)))
