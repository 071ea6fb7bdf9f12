"""The generator's end of the NCCL transport; runs inside vLLM's worker, registered by
`lrl.vllm_plugin.plugin`.

vLLM's own engine takes all weights from one rank; this one takes from each trainer rank the rows
that it holds. NCCL's kernels wait for a lost member for ever, and so does the worker: the trainer
then kills its server.
"""

import base64
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from lrl.weights.buckets import buckets_of, damaged, exchange
from lrl.weights.communicator import join
from lrl.weights.wire import TensorSpec


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A communicator to join."""

    unique_id: str
    """Base64."""
    rank_offset: int
    """Rank of this generator's first worker."""
    world_size: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The weights that travel, in their order, and the rows that each trainer rank sends of them
    (`lrl.weights.buckets`)."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    rows: list[list[tuple[int, int]]]
    bucket_bytes: int


class NcclEngine(NCCLWeightTransferEngine):
    """Puts the weights together from what all ranks broadcast, and loads them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins a new communicator and leaves the one before."""
        self.shutdown()
        self.model_update_group = join(
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
        group = self.model_update_group
        if group is None:
            raise RuntimeError(
                "This generator is in no communicator: /init_weight_transfer_engine comes first."
            )
        faults: list[Tensor] = []
        weights = self._received(group, update_info, faults)
        self.model.load_weights(weights)
        deque(weights, maxlen=0)  # a model may stop before the end, and the others send it all
        if torch.stack(faults).any():
            raise ValueError("weights have arrived damaged: a checksum does not fit")

    def _received(
        self, group: Any, update: UpdateInfo, faults: list[Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        dtypes = (getattr(torch, name) for name in update.dtypes)
        tensors = list(map(TensorSpec, update.names, dtypes, map(tuple, update.shapes)))
        for bucket in buckets_of(tensors, update.rows, update.bucket_bytes):
            packed = exchange(group, bucket, group.rank, own=None, device=self.device)
            faults.append(damaged(packed))
            yield from bucket.unpack(packed)
