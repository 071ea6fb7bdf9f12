"""Weights of one process, as the transports ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from lrl.distributed.ranks import Ranks
from lrl.system.endpoint import Endpoint
from lrl.training.pieces import Piece, piece_of
from lrl.weights.staging import Served, Staged, StageOrder, Staging


class WholeWeights:
    """What `weights` yields, as one part."""

    def __init__(self, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self.weights = weights
        self.staging = Staging()

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights()

    def stage(self, order: StageOrder) -> Staged:
        def pieces() -> Iterator[Piece]:
            return (piece_of(name, one, Ranks()) for name, one in self.weights())

        return self.staging.stage(pieces, order, Ranks())

    def serve(self, endpoint: Endpoint, token: str) -> list[Served]:
        return self.staging.serve(endpoint, token, Ranks())
