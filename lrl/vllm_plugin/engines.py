"""The generators' ends of the transports; they run inside vLLM's worker.

vLLM's CPU build packs weights at load into the form that its kernels take. Most layers are packed
again as their weights arrive; for two kinds an update would not reach that form. A proof is what
would notice a third kind.

- An output head that is tied to the embedding gets no weights of its own, and would stay as it was
  loaded: log-probs were off by 0.7 nats with every other layer right. It is packed when all weights
  are there.
- Experts are packed when their kernel is made, which is once; Mixtral was off by 0.09. Without the
  old kernel the new weights are taken as at load.
"""

from __future__ import annotations

import base64
import copy
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from lrl.system.machine import trim_heap
from lrl.training.merging import UP
from lrl.weights.buckets import Bucket, Plan, buckets_of, damaged, exchange, raise_if_damaged
from lrl.weights.nccl import abort, join_communicator
from lrl.weights.version_file import check_file, merged, path_of

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)
DEVICE = 6
"""Place of the device's index among the arguments of torch's `rebuild_cuda_tensor`."""


class Engine(WeightTransferEngine[Init, Update]):
    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            for layer in self.model.modules():
                method = getattr(layer, "quant_method", None)
                if isinstance(method, FusedMoEMethodBase):
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, which would wait for an accelerator also on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            for layer in self.model.modules():
                if isinstance(layer, ParallelLMHead):
                    layer.quant_method.process_weights_after_loading(layer)
            # Every update frees the older weights, and the C library would keep their memory.
            trim_heap()

    def shutdown(self) -> None:
        """Releases what is held between updates; here nothing."""


# ---- by files


@dataclass
class FileInfo(WeightTransferUpdateInfo):
    file: str
    checksum: str
    """Of its header."""


class FileEngine(Engine[WeightTransferInitInfo, FileInfo]):
    init_info_cls = WeightTransferInitInfo
    update_info_cls = FileInfo

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Does nothing: there is no group to join."""

    def receive_weights(self, update_info: FileInfo) -> None:
        """Loads the file; raises ValueError for a damaged one, before any weight is replaced."""
        # Opened once: what is loaded is what was checked.
        with open(update_info.file, "rb") as file:
            own = path_of(file.fileno())
            check_file(own, update_info.checksum)
            tensors = load_file(own, device=str(self.device))
        dtype = cast(torch.dtype, self.model_config.dtype)
        self.model.load_weights(
            merged(self._first_version(), tensors, dtype)
            if any(name.endswith(UP) for name in tensors)
            else tensors.items()
        )

    def _first_version(self) -> Iterable[tuple[str, Tensor]]:
        """Returns the weights that the generator began with, from its files. All of them: vLLM
        gives a layer that gets a part of its weights random ones for the rest."""
        config = copy.copy(self.vllm_config.load_config)
        config.use_tqdm_on_load = False
        loader = cast(DefaultModelLoader, get_model_loader(config))
        return loader.get_all_weights(self.model_config, self.model)


# ---- within one GPU


@dataclass
class BufferInfo(WeightTransferInitInfo):
    plan: Plan
    """What goes through it."""
    handle: str
    """Torch's handle of it, pickled, base64. Who sends it has the run's token."""


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    bucket: int


class IpcEngine(Engine[BufferInfo, BucketInfo]):
    init_info_cls = BufferInfo
    update_info_cls = BucketInfo
    _buckets: list[Bucket]
    _buffer: Tensor

    def init_transfer_engine(self, init_info: BufferInfo) -> None:
        arguments = list(pickle.loads(base64.b64decode(init_info.handle)))
        arguments[DEVICE] = self.device.index  # here the GPU may have another number
        self._buckets = buckets_of(init_info.plan)
        self._buffer = rebuild_cuda_tensor(*arguments)

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Loads a bucket; raises ValueError for a damaged one."""
        bucket = self._buckets[update_info.bucket]
        packed = [self._buffer[: bucket.words(0)]]
        raise_if_damaged(damaged(packed))
        self.model.load_weights(bucket.unpack(packed))


# ---- by NCCL


@dataclass
class CommunicatorInfo(WeightTransferInitInfo):
    plan: Plan
    """What travels in it."""
    unique_id: str
    """Base64."""
    rank_offset: int
    """Rank of this generator's first worker."""
    world_size: int


class NcclEngine(Engine[CommunicatorInfo, WeightTransferUpdateInfo]):
    """NCCL's kernels wait for a lost member for ever, and so does the worker: the trainer then has
    its server killed."""

    init_info_cls = CommunicatorInfo
    update_info_cls = WeightTransferUpdateInfo
    _group: Any = None
    _buckets: list[Bucket]

    def init_transfer_engine(self, init_info: CommunicatorInfo) -> None:
        self.shutdown()
        self._buckets = buckets_of(init_info.plan)
        self._group = join_communicator(
            base64.b64decode(init_info.unique_id),
            rank=init_info.rank_offset + self.parallel_config.rank,
            world_size=init_info.world_size,
            device=self.device,
        )

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        """Raises ValueError for a damaged update."""
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
        abort(self._group)
        self._group = None
