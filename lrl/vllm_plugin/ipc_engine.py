"""The generator's end of the transport within one GPU (`lrl.vllm_plugin.engine`)."""

import base64
import pickle
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from lrl.vllm_plugin.engine import Engine
from lrl.weights.buckets import Bucket, Plan, damaged, raise_if_damaged

DEVICE = 6
"""Place of the device's index among the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The trainer's buffer."""

    plan: dict[str, Any]
    """What goes through it (`lrl.weights.buckets.Plan`)."""
    handle: str
    """Torch's handle of it, pickled, base64. Who sends it has the run's token."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The bucket that is in the buffer."""

    bucket: int


class IpcEngine(Engine[InitInfo, UpdateInfo]):
    """Copies the weights out of the trainer's buffer, and loads them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _buckets: list[Bucket]
    _buffer: Tensor

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Opens the buffer."""
        arguments = list(pickle.loads(base64.b64decode(init_info.handle)))
        arguments[DEVICE] = self.device.index  # here the GPU may have another number
        self._buckets = Plan(**init_info.plan).buckets()
        self._buffer = rebuild_cuda_tensor(*arguments)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Loads a bucket; raises ValueError for a damaged one."""
        bucket = self._buckets[update_info.bucket]
        packed = [self._buffer[: bucket.words(0)]]
        raise_if_damaged(damaged(packed))
        self.model.load_weights(bucket.unpack(packed))
