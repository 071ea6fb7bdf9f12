"""Weights through a file in shared memory: for any single machine, with or without GPUs.

The trainer writes one safetensors file while the generators still write responses; in the pause
they only map and load it. A checksum makes a worker refuse a damaged file. Each version has a
folder of its own, under a name that nobody can guess and closed to other users, who could otherwise
put a link or a file of theirs in its place. The fallback is the temporary folder. The name of the
folder begins with the run's id, by which the supervisor finds those of a killed run.
"""

import shutil
import tempfile
from pathlib import Path

from lrl.weights import staged_file
from lrl.weights.group_calls import GeneratorGroupCalls
from lrl.weights.staged_file import stage_file
from lrl.weights.transport import Transport
from lrl.weights.wire import TensorSpec, Weights, cast_for_transfer, tensor_specs


class SharedMemory(Transport):
    """The trainer's end of `lrl.vllm_plugin.shared_memory_engine`."""

    backend = "shared_memory"
    copies = True
    attempts = 3

    @classmethod
    def join_refusal(cls, same_machine: bool, host: str) -> str:
        """Shared memory ends at the machine."""
        if same_machine:
            return ""
        return (
            "moves its weights through shared memory, which only its own machine has, and this is "
            "another one. Join there, or start the run with strategy.weight_transfer: pull, or "
            "nccl on GPUs."
        )

    @classmethod
    def stored_bytes(cls, weight_bytes: int, pools: int, generators: int) -> int:
        """A file for each pool, and one more: a new version is written next to the older one."""
        return (pools + 1) * weight_bytes

    def __init__(self) -> None:
        self._name = ""
        self._tensors: list[TensorSpec] = []
        self._file: Path | None = None
        self._checksum = 0

    def connect(self, calls: GeneratorGroupCalls, weights: Weights, name: str) -> None:
        self._name = f"lrl-{name}-"
        calls.init_weight_transfer_engine({})

    def stage(self, weights: Weights, use_fallback: bool) -> None:
        """Writes the weights next to the older file, then removes that one."""
        self._tensors = self._tensors or tensor_specs(weights, narrow=None)
        place = tempfile.gettempdir() if use_fallback else staged_file.SHARED_MEMORY
        file = Path(tempfile.mkdtemp(prefix=self._name, dir=place), "weights.safetensors")
        try:
            found = stage_file(self._tensors, cast_for_transfer(weights, narrow=None), file)
        except BaseException:
            shutil.rmtree(file.parent)
            raise
        self.close()
        self._file = file
        self._checksum = found

    def send(self, calls: GeneratorGroupCalls) -> None:
        calls.start_weight_update()
        calls.update_weights({"file": str(self._file), "checksum": self._checksum})
        calls.finish_weight_update()

    def close(self) -> None:
        """Removes the file."""
        if self._file is not None:
            shutil.rmtree(self._file.parent, ignore_errors=True)
            self._file = None
