"""Weights through a file in shared memory: works on any one machine, needs no GPU.

The trainer writes one safetensors file while the generators still write answers; in the pause they only map and load
it. The file replaces its predecessor by a rename, so a worker never sees half of one. The file's name begins with the
run's id: that is how whoever cleans up after a killed run finds it.
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file

from lrl.weights.base import Control, Transport, Weights

SHARED_MEMORY = Path("/dev/shm")


class SharedMemory(Transport):
    """The trainer's end of `lrl.weights.shared_memory_engine`."""

    backend = "shared_memory"

    def __init__(self) -> None:
        self._file: Path | None = None

    def connect(self, control: Control, weights: Weights, name: str) -> None:
        """See `Transport.connect`; the two ends need no handshake beyond the engine's own."""
        self._file = SHARED_MEMORY / f"lrl-{name}.safetensors"
        control.init_weight_transfer_engine({})

    def stage(self, weights: Weights) -> None:
        """Write the weights next to the old file, then rename."""
        assert self._file is not None, "connect comes first"
        draft = self._file.with_suffix(".draft")
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights()}
        needed = sum(tensor.nbytes for tensor in tensors.values())
        free = os.statvfs(SHARED_MEMORY).f_bavail * os.statvfs(SHARED_MEMORY).f_frsize
        if needed > free:
            raise OSError(
                f"{SHARED_MEMORY} has {free / 2**30:.2f} GiB free and the weights take {needed / 2**30:.2f} GiB (twice "
                f"that while a new version replaces the old one). Enlarge it (`mount -o remount,size=...`)."
            )
        save_file(tensors, draft)
        draft.rename(self._file)

    def send(self, control: Control) -> None:
        """See `Transport.send`."""
        control.start_weight_update()
        control.update_weights({"file": str(self._file)})
        control.finish_weight_update()

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file.with_suffix(".draft").unlink(missing_ok=True)
