"""Weights into generators: one sync (`sync`), one proof (`proof`), one file per transport.

Hides vLLM's weight-transfer engines and routes. A new transport is a file and its line in
`TRANSPORTS`.
"""

from importlib import import_module

from lrl.errors import ConfigError
from lrl.system.endpoint import is_loopback
from lrl.weights.transport import Machine, Transport

__all__ = ["TRANSPORTS", "Machine", "Transport", "choose_transport", "find_transport"]

TRANSPORTS = {
    "ipc": "lrl.weights.ipc:Ipc",
    "nccl": "lrl.weights.nccl:Nccl",
    "shared_memory": "lrl.weights.shared_memory:SharedMemory",
    "pull": "lrl.weights.pull:Pull",
}
"""The class of each transport; `auto` takes the first that works on this machine, and for joining
generators if others may join."""
ON_CUDA = ("ipc", "nccl")
"""Transports between GPUs, which a run on a CPU does not import."""
NOT_DRIVEN = {
    "nccl_m2n": (
        "which lrl does not drive: vLLM's engine needs the packages nccl-extensions and NCCL "
        "2.30.5 or newer, and whether a transfer in it can be ended when a member is lost was "
        "never tried"
    ),
}
"""Engines of vLLM that a user may ask for by name, and why they are refused."""


def find_transport(name: str) -> type[Transport]:
    """Returns the class of a transport; raises ConfigError for an unknown name."""
    if name not in TRANSPORTS:
        raise ConfigError(
            f"strategy.weight_transfer is {name!r}; choose auto, {', '.join(TRANSPORTS)}."
        )
    module, _, attribute = TRANSPORTS[name].partition(":")
    found: type[Transport] = getattr(import_module(module), attribute)
    return found


def choose_transport(name: str, machine: Machine) -> type[Transport]:
    """Returns the transport that `strategy.weight_transfer` stands for on `machine`.

    Raises:
        ConfigError: The name is unknown, or the machine does not allow it; names the transport that
            works.
    """
    candidates = (one for one in TRANSPORTS if machine.on_cuda or one not in ON_CUDA)
    works = next(one for one in map(find_transport, candidates) if _suits(one, machine))
    if name == "auto":
        return works
    if why := NOT_DRIVEN.get(name) or find_transport(name).refusal(machine):
        raise ConfigError(
            f"strategy.weight_transfer is {name!r}, {why}. Here `{works.backend}` works."
        )
    return find_transport(name)


def _suits(transport: type[Transport], machine: Machine) -> bool:
    if not is_loopback(machine.host) and transport.join_refusal(False, machine.host):
        return False
    return not transport.refusal(machine)
