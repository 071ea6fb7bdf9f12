"""Weights by CUDA IPC: the generator opens the trainer's buffer in place, on the GPU that both
share. It takes one bucket after the other (`lrl.weights.buckets`)."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from lrl.training.pieces import piece_of
from lrl.weights.buckets import Bucket, buckets_of, plan_of, this_device
from lrl.weights.pool_calls import PoolCalls
from lrl.weights.transport import Machine, Policy, Transport
from lrl.weights.version_file import held_rows

BUCKET_BYTES = 2**28
"""Bytes of weights in the buffer; one tensor more may come on top."""


class Ipc(Transport):
    backend = "ipc"

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """A CUDA handle opens on its own device."""
        if not machine.on_cuda:
            return "which needs a CUDA GPU"
        if machine.ranks > 1:
            return f"but {machine.ranks} ranks train, and one alone shares the generator's GPU"
        return "" if machine.shares_device else "but the generator has a GPU of its own"

    @classmethod
    def join_refusal(cls, same_machine: bool, host: str) -> str:
        return (
            "moves its weights within one GPU (ipc), which its one generator shares with the "
            "trainer. For a fleet that grows, start it with strategy.generator_devices above 0."
        )

    def __init__(self, policy: Policy, name: str) -> None:
        super().__init__(policy, name)
        self._buckets: list[Bucket] = []
        self._buffer: Tensor | None = None
        self._dtype = torch.float32
        self._info: dict[str, Any] = {}

    def connect(self, calls: PoolCalls) -> None:
        if self._buffer is None:
            dtype = self._dtype = getattr(torch, calls.participants[0].server.settings.dtype)
            whole = self.policy.whole_weights(dtype)
            pieces = (piece_of(name, one, self.policy.ranks) for name, one in whole)
            plan = plan_of([held_rows(pieces, dtype)], BUCKET_BYTES)
            self._buckets = buckets_of(plan)
            words = max(bucket.words(0) for bucket in self._buckets)
            self._buffer = new_buffer(words)
            # Once: every export has a count of readers of its own, which torch adds to the buffer.
            handle = base64.b64encode(pickle.dumps(reduce_tensor(self._buffer)[1])).decode()
            self._info = {"plan": plan, "handle": handle}
        calls.init(self._info)

    def send(self, calls: PoolCalls) -> None:
        assert self._buffer is not None, "connected before"
        weights = (tensor for _, tensor in self.policy.whole_weights(self._dtype))
        for number, bucket in enumerate(self._buckets):
            bucket.pack(islice(weights, len(bucket.tensors)), self._buffer[: bucket.words(0)])
            torch.cuda.current_stream().synchronize()
            calls.update(lambda one, number=number: {"bucket": number})  # type: ignore[misc]

    def close(self) -> None:
        self._buffer = None


def new_buffer(words: int) -> Tensor:
    """Returns a buffer that another process can open: int64 [words].

    It lies in no expandable segment. Torch passes those on by a system call that needs the right to
    trace the other process, which containers do not give (pytorch#165685).
    """
    own = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments" not in own:
        return torch.empty(words, dtype=torch.int64, device=this_device())
    change: Callable[[str], None] = torch._C._accelerator_setAllocatorSettings
    change(f"{own},expandable_segments:False")
    try:
        return torch.empty(words, dtype=torch.int64, device=this_device())
    finally:
        change(own)
