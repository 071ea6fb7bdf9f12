"""Weights in memory, as the transports ask for them: a policy without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lrl.system.endpoint import Endpoint
from lrl.system.event_loop import start_daemon_call
from lrl.system.ranks import Ranks, collective, follow
from lrl.training.pieces import Piece, piece_of
from lrl.weights.buckets import JoinOrder, Plan
from lrl.weights.nccl import Broadcast
from lrl.weights.staging import Served, StageOrder, Staging
from lrl.weights.version_file import Header
from tests.weights.threaded_ranks import threaded_ranks

Weights = Callable[[], Iterable[tuple[str, Tensor]]]


class WeightsOfRank:
    """What `weights` yields, of which a rank sends its rows."""

    def __init__(self, weights: Weights, ranks: Ranks) -> None:
        self.weights = weights
        self.ranks = ranks
        self.staging = Staging()
        self.broadcast = Broadcast()

    def whole_weights(self, merged_in: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights())

    def pieces(self) -> Iterator[Piece]:
        return (piece_of(name, one, self.ranks) for name, one in self.weights())

    @collective
    def stage_weights(self, order: StageOrder) -> Header:
        try:
            return self.staging.stage(self.pieces, order, self.ranks)
        finally:
            self.ranks.gather(None)  # no rank is asked for its part before it has it

    @collective
    def serve_weights(self, endpoint: Endpoint, token: str) -> list[Served]:
        return self.staging.serve(endpoint, token, self.ranks)

    @collective
    def join_broadcast(self, pool: str, order: JoinOrder) -> tuple[Plan, Future[Any]]:
        return self.broadcast.join(self.pieces, order, self.ranks)

    @collective
    def send_broadcast(self, pool: str) -> Future[None]:
        return self.broadcast.send(self.ranks)

    @collective
    def end_broadcast(self, pool: str, abort: bool, deadline_s: float) -> None:
        self.broadcast.end(abort, deadline_s)


class WholeWeights(WeightsOfRank):
    """The same on rank 0, which leads the other ranks, each on a thread."""

    def __init__(self, weights: Weights, ranks: int = 1) -> None:
        first, *others = threaded_ranks(ranks)
        super().__init__(weights, first)
        self.all = [self, *(WeightsOfRank(weights, one) for one in others)]
        self._threads = [start_daemon_call(partial(follow, one), "rank") for one in self.all[1:]]

    def close(self) -> None:
        """Ends the other ranks, raises the error of one that has failed, and frees all parts."""
        follow(self)
        for thread in self._threads:
            thread.result(60)
        for one in self.all:
            one.staging.close()


class SmallPolicy(WholeWeights):
    """A matrix of which a step changes little, a vector, and integers."""

    def __init__(self, ranks: int = 1) -> None:
        torch.manual_seed(0)
        matrix = torch.nn.Parameter(torch.randn(300, 256))
        # A view, as parameters may be.
        named = {"matrix": matrix.t(), "vector": torch.randn(65), "steps": torch.zeros(3).long()}
        self.tensors: dict[str, Tensor] = named
        super().__init__(self.tensors.items, ranks)

    @torch.no_grad()
    def step(self) -> None:
        self.tensors["matrix"][:, 0] += 1
        self.tensors["vector"] += 1
        self.tensors["steps"] += 1

    def is_in(self, found: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> bool:
        """Whether these are exactly its weights, as a generator in `dtype` has them."""
        held = self.tensors | {"matrix": self.tensors["matrix"].to(dtype)}
        same = (found[name].equal(weight) for name, weight in held.items())
        return found.keys() == held.keys() and all(same)
