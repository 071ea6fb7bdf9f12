"""Weights by CUDA IPC: the generator opens the trainer's tensors in place, on the GPU that both share."""

import base64
import pickle
from collections.abc import Mapping
from typing import Any

from lrl.weights.control import Control
from lrl.weights.transport import Machine
from lrl.weights.vllm_engine import VllmTransport


class _PickledHandles:
    """The control plane with CUDA handles pickled for JSON, as vLLM's route expects them.

    vLLM unpickles them only with VLLM_ALLOW_INSECURE_SERIALIZATION=1, which only this transport's servers have; they
    listen on loopback.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self.init_weight_transfer_engine = control.init_weight_transfer_engine
        self.start_weight_update = control.start_weight_update
        self.finish_weight_update = control.finish_weight_update

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Sends one chunk of handles."""
        info = dict(update_info)
        handles = info.pop("ipc_handles")
        info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._control.update_weights(info)


class Ipc(VllmTransport):
    """The transport to a generator that shares the trainer's GPU."""

    backend = "ipc"

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """CUDA handles are opened on the device that they point to."""
        if not machine.on_cuda:
            return "which needs a CUDA GPU"
        return "" if machine.shares_device else "but the generator has a GPU of its own"

    @classmethod
    def join_refusal(cls, same_machine: bool) -> str:
        """The one generator on the trainer's GPU is the run's own."""
        return (
            "moves its weights within one GPU (ipc), which its one generator shares with the trainer. For a fleet that "
            "grows, start it with strategy.generator_devices above 0."
        )

    @classmethod
    def server_environment(cls, number: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """vLLM unpickles the handles (`_PickledHandles`)."""
        return {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

    def init_info(self, control: Control) -> Any:
        """Returns packed transfer: one bounded staging buffer instead of a second copy of the policy."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(packed=True, rank=0)

    def client(self, control: Control) -> Any:
        """See `VllmTransport.client`."""
        return _PickledHandles(control)
