"""Weights in memory, as the transports ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor, dtype

from lrl.system.endpoint import Endpoint
from lrl.system.ranks import Ranks
from lrl.training.pieces import Piece, piece_of
from lrl.weights.buckets import JoinOrder, Plan
from lrl.weights.nccl import Broadcast
from lrl.weights.staging import Served, StageOrder, Staging
from lrl.weights.version_file import Header


class WholeWeights:
    """What `weights` yields, of which a rank sends its rows; by default of one rank."""

    def __init__(
        self, weights: Callable[[], Iterator[tuple[str, Tensor]]], ranks: Ranks | None = None
    ) -> None:
        self.weights = weights
        self.ranks = ranks or Ranks()
        self.staging = Staging()
        self.broadcast = Broadcast()

    def whole_weights(self, merged_in: dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return self.weights()

    def pieces(self) -> Iterator[Piece]:
        return (piece_of(name, one, self.ranks) for name, one in self.weights())

    def stage_weights(self, order: StageOrder) -> Header:
        return self.staging.stage(self.pieces, order, self.ranks)

    def serve_weights(self, endpoint: Endpoint, token: str) -> list[Served]:
        return self.staging.serve(endpoint, token, self.ranks)

    def join_broadcast(self, pool: str, order: JoinOrder) -> tuple[Plan, Future[Any]]:
        return self.broadcast.join(self.pieces, order, self.ranks)

    def send_broadcast(self, pool: str) -> Future[None]:
        return self.broadcast.send(self.ranks)

    def end_broadcast(self, pool: str, abort: bool, deadline_s: float) -> None:
        self.broadcast.end(abort, deadline_s)


class WeightsOfRanks(WholeWeights):
    """The same of several ranks, each a thread that rank 0 leads."""

    def __init__(
        self, weights: Callable[[], Iterator[tuple[str, Tensor]]], ranks: list[Ranks]
    ) -> None:
        super().__init__(weights, ranks[0])
        self.others = [WholeWeights(weights, one) for one in ranks[1:]]
        self.threads = ThreadPoolExecutor(len(ranks))

    def join_broadcast(self, pool: str, order: JoinOrder) -> tuple[Plan, Future[Any]]:
        with self._led(lambda one: one.join_broadcast(pool, order)):
            return super().join_broadcast(pool, order)

    def send_broadcast(self, pool: str) -> Future[None]:
        with self._led(lambda one: one.send_broadcast(pool)):
            return super().send_broadcast(pool)

    def end_broadcast(self, pool: str, abort: bool, deadline_s: float) -> None:
        with self._led(lambda one: one.end_broadcast(pool, abort, deadline_s)):
            super().end_broadcast(pool, abort, deadline_s)

    @contextmanager
    def _led(self, call: Callable[[WholeWeights], Any]) -> Iterator[None]:
        called = [self.threads.submit(call, one) for one in self.others]
        yield
        for one in called:
            one.result(60)
