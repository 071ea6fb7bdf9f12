"""Weights by NCCL: vLLM's packed broadcast from trainer rank 0 to every worker of every generator."""

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from lrl.generators.endpoint import LOOPBACK, is_loopback
from lrl.weights.control import Control
from lrl.weights.transport import Machine
from lrl.weights.vllm_engine import VllmTransport


class Nccl(VllmTransport):
    """The transport to generators on other GPUs than the trainer's."""

    backend = "nccl"

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """NCCL refuses two processes on one GPU, unless it takes them for two machines.

        NCCL_HOSTID in the trainer's environment asks for that (not run yet).
        """
        if not machine.on_cuda:
            return "which needs a CUDA GPU"
        if machine.shares_device and "NCCL_HOSTID" not in os.environ:
            return "but the generator shares the trainer's GPU"
        return ""

    @classmethod
    def server_environment(cls, number: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Another host for each generator, where the trainer's environment names one (`refusal`)."""
        host = inherited.get("NCCL_HOSTID")
        return {} if host is None else {"NCCL_HOSTID": f"{host}-generator-{number}"}

    def init_info(self, control: Control) -> Any:
        """Returns the group: rank 0 is the trainer, the workers of all generators follow (`Control` numbers them)."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        address = local_address_for([generator.client.url for generator in control.taking_part])
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        workers = sum(generator.server.settings.tensor_parallel_size for generator in control.taking_part)
        return NCCLTrainerInitInfo(
            master_address=address, master_port=port, world_size=1 + workers, packed=True, rank=0
        )


def local_address_for(urls: Sequence[str]) -> str:
    """Returns this machine's address as generators at `urls` see it: loopback, unless one is on another machine.

    Not run between two machines yet.
    """
    # Connecting a datagram socket sends nothing; the kernel only chooses the address it would send from.
    seen = LOOPBACK
    for address in map(urlsplit, urls):
        family, kind, _, _, target = socket.getaddrinfo(address.hostname, address.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            own = str(probe.getsockname()[0])
        if not is_loopback(own) and own != target[0]:
            seen = own
    return seen
