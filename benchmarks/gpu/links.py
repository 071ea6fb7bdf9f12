"""Communicators of two processes: torch's process group, and NCCL's as lrl holds it through vLLM.

torch's on a CPU is gloo. Its watchdog is off (`UNWATCHED`): it would end a process whose collective
fails, before anybody could see what an abort does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group

from benchmarks.gpu.row_processes import WAIT_S, Part, connect
from lrl.weights import communicator

UNWATCHED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Link(Protocol):
    """One member of a communicator of two."""

    about: str

    def __init__(self, part: Part, name: str, rank: int) -> None: ...

    def broadcast(self, tensor: Tensor) -> None:
        pass

    def all_reduce(self, tensor: Tensor) -> None:
        pass

    def abort(self) -> None:
        pass


class OfTorch:
    """The default process group."""

    def __init__(self, part: Part, name: str, rank: int) -> None:
        on_gpu = part.device.type == "cuda"
        backend = "nccl" if on_gpu else "gloo"
        self.about = f"{backend} {'.'.join(map(str, torch.cuda.nccl.version())) if on_gpu else ''}"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, connect(part.port)),  # its threads wait there, too
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=WAIT_S),
            device_id=part.device if on_gpu else None,
        )

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def abort(self) -> None:
        _abort_process_group()


class OfVllm:
    """NCCL's communicator of a weight transfer (`lrl.weights.communicator`)."""

    def __init__(self, part: Part, name: str, rank: int) -> None:
        if rank == 0:
            part.give(name, communicator.new_unique_id())
        self._group = communicator.join(part.take(name), rank, 2, part.device)
        self.about = f"vLLM's NCCL {self._group.nccl.ncclGetVersion()}"

    def broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor, src=0)

    def all_reduce(self, tensor: Tensor) -> None:
        self._group.all_reduce(tensor)

    def abort(self) -> None:
        if not communicator.abort(self._group):
            raise TimeoutError(f"the abort did not end within {communicator.ABORT_S:g} s")


LINKS: dict[str, type[Link]] = {"torch": OfTorch, "vllm": OfVllm}
