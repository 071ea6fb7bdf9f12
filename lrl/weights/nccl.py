"""Weights by NCCL: vLLM's packed broadcast from trainer rank 0 to every worker of every generator."""

from __future__ import annotations

import socket
from typing import Any

from lrl.weights.base import Control
from lrl.weights.vllm_engine import VllmTransport


class Nccl(VllmTransport):
    """For generators on other GPUs than the trainer's."""

    backend = "nccl"

    def init_info(self, control: Control) -> Any:
        """Rank 0 is the trainer; the workers of all generators follow (`Control` hands out their offsets)."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        workers = sum(generator.server.settings.tensor_parallel_size for generator in control.taking_part)
        return NCCLTrainerInitInfo(
            master_address="127.0.0.1", master_port=port, world_size=1 + workers, packed=True, rank=0
        )
