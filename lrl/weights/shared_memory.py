"""Weights through a file in shared memory: for any single machine, with or without GPUs.

Every rank writes its part of one file while the generators still write; in the pause they only load
it. Each version has a folder of its own, under a name that nobody can guess and closed to other
users, who could otherwise put a link or a file of theirs in its place. The name begins with the
run's id, by which the supervisor finds those of a killed run."""

import shutil
import tempfile
from pathlib import Path

from lrl.weights.pool_calls import PoolCalls
from lrl.weights.staging import StageOrder
from lrl.weights.transport import Machine, Policy, Transport
from lrl.weights.version_file import SHARED_MEMORY, open_new


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

    @classmethod
    def stored_bytes(cls, weight_bytes: int, pools: int, generators: int) -> int:
        """A file for each pool, and one more: a new version is written next to the older one."""
        return (pools + 1) * weight_bytes

    def __init__(self, policy: Policy, name: str) -> None:
        super().__init__(policy, name)
        self._file: Path | None = None
        self._checksum = ""

    def stage(self) -> None:
        """Writes the weights next to the older file, then removes that one."""
        folder = Path(tempfile.mkdtemp(prefix=f"lrl-{self.name}-", dir=SHARED_MEMORY))
        file = folder / "weights.safetensors"
        try:
            open_new(file).close()
            header = self.policy.stage_weights(StageOrder(self.name, None, str(file)))
        except BaseException:
            shutil.rmtree(folder)
            raise
        self.close()
        self._file = file
        self._checksum = header.checksum

    def send(self, calls: PoolCalls) -> None:
        calls.update(lambda one: {"file": str(self._file), "checksum": self._checksum})

    def close(self) -> None:
        if self._file is not None:
            shutil.rmtree(self._file.parent, ignore_errors=True)
            self._file = None
