"""Weights through a file in shared memory: for any single machine, with or without GPUs.

The trainer writes one safetensors file while the generators still write responses; in the pause they only map and load
it. A rename replaces the older file, so a worker never sees half of one, and a checksum makes a worker refuse a damaged
file. The fallback is a file in the temporary folder. The name begins with the run's id, by which the supervisor finds
the files of a killed run.
"""

import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from lrl.weights.checksum import checksum
from lrl.weights.control import Control, Weights
from lrl.weights.transport import Transport

SHARED_MEMORY = Path("/dev/shm")


class SharedMemory(Transport):
    """The trainer's end of `lrl.weights.shared_memory_engine`."""

    backend = "shared_memory"
    copies = True
    attempts = (False, False, True)

    @classmethod
    def join_refusal(cls, same_machine: bool) -> str:
        """Shared memory ends at the machine."""
        if same_machine:
            return ""
        return (
            "moves its weights through shared memory, which only its own machine has, and this is another one. Join "
            "there, or start the run on GPUs with strategy.weight_transfer: nccl."
        )

    @classmethod
    def room_refusal(cls, weight_bytes: int, pools: int) -> str:
        """A file for each pool, and one more: a new version is written beside the older one."""
        needed, free = (pools + 1) * weight_bytes, shutil.disk_usage(SHARED_MEMORY).free
        if needed <= free:
            return ""
        return (
            f"{SHARED_MEMORY} has {free / 2**30:.2f} GiB free, and strategy.weight_transfer shared_memory takes "
            f"{needed / 2**30:.2f}. Enlarge it: `mount -o remount,size={needed // 2**30 + 1}G {SHARED_MEMORY}`, or "
            "`docker run --shm-size` for a container."
        )

    def __init__(self) -> None:
        self._name = ""
        self._file: Path | None = None
        self._checksum = 0

    def connect(self, control: Control, weights: Weights, name: str) -> None:
        """See `Transport.connect`."""
        self._name = f"lrl-{name}.safetensors"
        control.init_weight_transfer_engine({})

    def stage(self, weights: Weights, use_fallback: bool) -> None:
        """Writes the weights next to the older file, then renames."""
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in weights()}
        folder = Path(tempfile.gettempdir()) if use_fallback else SHARED_MEMORY
        _require_room(folder, sum(tensor.nbytes for tensor in tensors.values()))
        file = folder / self._name
        draft = file.with_suffix(".draft")
        try:
            save_file(tensors, draft)
            self._checksum = checksum(draft)
            draft.rename(file)
        except SafetensorError as error:  # its form of "no space left", when something else filled the folder meanwhile
            draft.unlink(missing_ok=True)
            raise OSError(f"{draft} could not be written: {error}") from error
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        if self._file not in (None, file):
            self.close()
        self._file = file

    def send(self, control: Control) -> None:
        """See `Transport.send`."""
        control.start_weight_update()
        control.update_weights({"file": str(self._file), "checksum": self._checksum})
        control.finish_weight_update()

    def close(self) -> None:
        """Removes the file."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None


def _require_room(folder: Path, needed: int) -> None:
    """Raises OSError if `folder` has not `needed` bytes free."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if needed > free:
        raise OSError(
            f"{folder} has {free / 2**30:.2f} GiB free and the weights take {needed / 2**30:.2f} GiB (twice that while "
            "a new version replaces the old one). Enlarge it (`mount -o remount,size=...` for /dev/shm)."
        )
