"""The trainer's end of a sync, one file per transport, and the choice among them."""

from __future__ import annotations

import os

from lrl.runtime.config_errors import ConfigError
from lrl.weights.base import Control, Transport, Weights

__all__ = ["TRANSPORTS", "Control", "Transport", "Weights", "choose_transport", "make_transport"]

TRANSPORTS = ("shared_memory", "ipc", "nccl")


def choose_transport(name: str, *, on_cuda: bool, shares_device: bool) -> str:
    """The transport that `name` stands for on this hardware.

    NCCL refuses two processes on one GPU unless it takes them for two machines. NCCL_HOSTID in the trainer's
    environment asks for that; the server then names another host to its generator. So far nobody has tried it.

    Args:
        name: `auto`, `shared_memory`, `ipc` or `nccl`.
        on_cuda: Whether trainer and generators are on GPUs.
        shares_device: Whether a generator has the trainer's own device.

    Raises:
        ValueError: The name is unknown, or the hardware for it is missing.
    """
    if name == "auto":
        return "shared_memory" if not on_cuda else "ipc" if shares_device else "nccl"
    if name not in TRANSPORTS:
        raise ConfigError(f"strategy.weight_transfer is {name!r}; choose auto, {', '.join(TRANSPORTS)}.")
    if name == "shared_memory":
        return name
    if not on_cuda:
        raise ConfigError(f"strategy.weight_transfer is {name!r}, which needs a CUDA GPU. Here `shared_memory` works.")
    if name == "nccl" and shares_device and "NCCL_HOSTID" in os.environ:
        return name
    if (name == "ipc") != shares_device:
        works = "ipc" if shares_device else "nccl"
        shape = "shares the trainer's GPU" if shares_device else "has a GPU of its own"
        raise ConfigError(f"strategy.weight_transfer is {name!r}, but the generator {shape}. Here `{works}` works.")
    return name


def make_transport(name: str) -> Transport:
    """The trainer's end of the transport `name` (one that `choose_transport` returned)."""
    from lrl.weights.ipc import Ipc
    from lrl.weights.nccl import Nccl
    from lrl.weights.shared_memory import SharedMemory

    transports: dict[str, type[Transport]] = {cls.backend: cls for cls in (SharedMemory, Ipc, Nccl)}
    return transports[name]()
