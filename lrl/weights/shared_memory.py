"""Weights through a file in memory: for any single machine, with or without GPUs.

Every rank writes its part of one file while the generators still write; in the pause they only
check and load it. The file has no name that another user could guess, open or replace: generators
open it through the trainer's process."""

import os

from lrl.system.machine import memory_file
from lrl.weights.pool_calls import PoolCalls
from lrl.weights.staging import StageOrder
from lrl.weights.transport import Machine, Policy, Transport
from lrl.weights.version_file import path_of


class SharedMemory(Transport):
    """The trainer's end of `lrl.vllm_plugin.engines.FileEngine`."""

    backend = "shared_memory"
    copies = True

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        return f"and the trainer has {machine.nodes} machines" if machine.nodes > 1 else ""

    @classmethod
    def join_refusal(cls, same_machine: bool, host: str) -> str:
        if same_machine:
            return ""
        return (
            "moves its weights through shared memory, which only its own machine has. Join there, or "
            "start the run with strategy.weight_transfer: pull, or nccl on GPUs."
        )

    def __init__(self, policy: Policy, name: str) -> None:
        super().__init__(policy, name)
        self._file = -1
        self._checksum = ""

    def stage(self) -> None:
        """Writes the weights next to the older file, then frees that one."""
        file = memory_file(self.name)
        try:
            header = self.policy.stage_weights(StageOrder(self.name, None, path_of(file)))
        except BaseException:
            os.close(file)
            raise
        self.close()
        self._file = file
        self._checksum = header.checksum

    def send(self, calls: PoolCalls) -> None:
        calls.update(lambda one: {"file": path_of(self._file), "checksum": self._checksum})

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
