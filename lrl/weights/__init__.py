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
    """Returns the transport that `strategy.weight_transfer` stands for on `machine`; raises
    ConfigError if the name is unknown or the machine does not allow it."""
    if name != "auto":
        chosen = find_transport(name)
        if why := chosen.refusal(machine):
            raise ConfigError(
                f"strategy.weight_transfer is {name!r}, {why}. Change that, or take auto."
            )
        return chosen
    is_open = not is_loopback(machine.host)
    for one in TRANSPORTS:
        if one in ON_CUDA and not machine.on_cuda:
            continue
        found = find_transport(one)
        why = found.refusal(machine)
        if not why and not (is_open and found.join_refusal(False, machine.host)):
            return found
    raise ConfigError(f"strategy.weight_transfer is 'auto', {why}.")
