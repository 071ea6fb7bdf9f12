"""The generator's end of the NCCL transport (`lrl.vllm_plugin.engine`).

vLLM's own takes all weights from one rank; this one takes from each trainer rank the rows that it
holds. NCCL's kernels wait for a lost member for ever, and so does the worker: the trainer then has
its server killed.
"""

import base64
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from lrl.vllm_plugin.engine import Engine
from lrl.weights.buckets import Bucket, Plan, damaged, exchange, raise_if_damaged
from lrl.weights.communicator import abort, join


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A communicator to join."""

    plan: dict[str, Any]
    """What travels in it (`lrl.weights.buckets.Plan`)."""
    unique_id: str
    """Base64."""
    rank_offset: int
    """Rank of this generator's first worker."""
    world_size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Empty: the plan says it all."""


class NcclEngine(Engine[InitInfo, UpdateInfo]):
    """Puts the weights together from what all ranks broadcast, and loads them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _group: Any = None
    _buckets: list[Bucket]

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins a new communicator and leaves the one before."""
        self.shutdown()
        self._buckets = Plan(**init_info.plan).buckets()
        self._group = join(
            base64.b64decode(init_info.unique_id),
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            device=self.device,
        )

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives and loads an update.

        Raises:
            RuntimeError: There is no communicator.
            ValueError: Something has arrived damaged.
        """
        if self._group is None:
            raise RuntimeError(
                "This generator is in no communicator: /init_weight_transfer_engine comes first."
            )
        faults: list[Tensor] = []
        weights = self._received(faults)
        self.model.load_weights(weights)
        deque(weights, maxlen=0)  # a model may stop before the end, and the others send it all
        raise_if_damaged(torch.stack(faults))

    def _received(self, faults: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets:
            packed = exchange(self._group, bucket, self._group.rank, own=None, device=self.device)
            faults.append(damaged(packed))
            yield from bucket.unpack(packed)

    def shutdown(self) -> None:
        """Leaves the communicator."""
        abort(self._group)
        self._group = None
