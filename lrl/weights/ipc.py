"""Weights by CUDA IPC: the generator opens the trainer's tensors in place, on the GPU that both
share."""

import base64
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from lrl.weights.pool_calls import PoolCalls
from lrl.weights.transport import Machine, Transport, Weights
from lrl.weights.wire import Wire

BUFFER_BYTES = 2**28
"""Bytes of the buffer, if the largest tensor has no more."""


class PickledHandles:
    """The control plane with CUDA handles pickled for JSON, as vLLM's route expects them.

    vLLM unpickles them only with VLLM_ALLOW_INSECURE_SERIALIZATION=1, which only this transport's
    servers have; they listen on loopback.
    """

    def __init__(self, calls: PoolCalls) -> None:
        self._calls = calls
        self.init_weight_transfer_engine = calls.init

    def start_weight_update(self) -> None:
        """The sync has opened it."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The sync closes it."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Sends one chunk of handles."""
        info = dict(update_info)
        handles = info.pop("ipc_handles")
        info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._calls.update(lambda one: info)


class Ipc(Transport):
    """The transport to a generator that shares the trainer's GPU; vLLM's engine drives the control
    plane by itself."""

    backend = "ipc"

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """A CUDA handle opens on its own device, and vLLM waits for the handles of every rank."""
        if not machine.on_cuda:
            return "which needs a CUDA GPU"
        if machine.adapters:
            return "which sends whole weights, and model.lora trains adapters"
        if machine.ranks > 1:
            return (
                f"but {machine.ranks} ranks train, and only one of them shares the generator's GPU"
            )
        return "" if machine.shares_device else "but the generator has a GPU of its own"

    @classmethod
    def join_refusal(cls, same_machine: bool, host: str) -> str:
        """The one generator on the trainer's GPU is the run's own."""
        return (
            "moves its weights within one GPU (ipc), which its one generator shares with the "
            "trainer. For a fleet that grows, start it with strategy.generator_devices above 0."
        )

    @classmethod
    def server_environment(cls, number: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """vLLM unpickles the handles (`PickledHandles`)."""
        return {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    @classmethod
    def buffer_bytes(cls, largest: int) -> int:
        """The buffer, and the generator's copy of its content."""
        return 2 * max(BUFFER_BYTES, largest)

    def __init__(self) -> None:
        self._engine: Any = None

    def connect(self, calls: PoolCalls, weights: Weights, name: str) -> None:
        """See `Transport.connect`. Packed: one bounded buffer instead of a second copy of the
        policy."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        wire = Wire(weights, getattr(torch, calls.participants[0].server.settings.dtype))
        size = max(BUFFER_BYTES, wire.largest)  # vLLM does not divide a tensor
        info = IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)
        client, source = PickledHandles(calls), wire.source()
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    def send(self, calls: PoolCalls) -> None:
        self._engine.send_weights()

    def close(self) -> None:
        """Tears down the engine."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
