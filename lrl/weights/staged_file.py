"""The file in which a trainer stages a version of its weights: safetensors, written one tensor at a
time.

For other processes of the machine it has a name in shared memory (`stage_file`). What the trainer
serves itself needs none (`UnnamedFile`).

The library's own writer wants all tensors at once, which would be a second copy of the policy on
rank 0.
"""

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from lrl.system.byte_counts import in_gib
from lrl.weights.wire import TensorSpec

SHARED_MEMORY = Path("/dev/shm")
FORMATS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
"""The names of number formats in a safetensors header."""


class UnnamedFile:
    """A file in memory that only this process has; the kernel frees it with the process, whatever
    ends that.

    A trainer whose generators are all on other machines has no supervisor here that would remove
    files of a name.
    """

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name)
        self.path = Path(f"/proc/self/fd/{self._descriptor}")
        """Where this process opens it."""

    def close(self) -> None:
        """Frees it, when no transfer reads it any more. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def stage_file(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], file: Path
) -> int:
    """Writes weights as safetensors into a new file; returns the checksum.

    Args:
        specs: What `tensors` will yield, in the order of the file.
        tensors: Names and tensors, in any order.
        file: It must not exist yet.

    Raises:
        OSError: There is no room.
    """
    head = header(specs)
    require_room(file.parent, len(head) + sum(one.nbytes for one in specs))
    try:
        with open_new(file) as out:
            _write(head, specs, tensors, out)
        return checksum(file)
    except OSError as error:
        raise OSError(f"{file} could not be written: {error}") from error


def stage_unnamed(
    specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], file: UnnamedFile
) -> int:
    """Writes weights as safetensors into `file`; returns the checksum. See `stage_file`.

    Raises:
        OSError: There is no memory for them.
    """
    head = header(specs)
    needed = len(head) + sum(one.nbytes for one in specs)
    free = psutil.virtual_memory().available
    if needed > free:
        takes, has = in_gib(needed, free)
        raise OSError(f"the weights take {takes} GiB of memory, and {has} GiB are free.")
    with file.path.open("wb") as out:
        _write(head, specs, tensors, out)
    return checksum(file.path)


def _write(
    head: bytes, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]], out: BinaryIO
) -> None:
    offsets = {}
    offset = len(head)
    for one in specs:
        offsets[one.name] = offset
        offset += one.nbytes
    out.write(head)
    for name, tensor in tensors:
        out.seek(offsets.pop(name))
        out.write(_bytes(tensor))
    if offsets:
        raise RuntimeError(
            f"The policy has no {min(offsets)} any more, which it had at the first sync."
        )


def header(specs: Sequence[TensorSpec]) -> bytes:
    """Returns the beginning of a safetensors file: the length of a table, and the table of what
    comes after it."""
    table: dict[str, Any] = {}
    end = 0
    for one in specs:
        begin, end = end, end + one.nbytes
        table[one.name] = {
            "dtype": FORMATS[one.dtype],
            "shape": one.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors after it are aligned
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def checksum(path: Path | str) -> int:
    """Returns XXH3 of a whole file, 64 bits, for its writer and its reader.

    A load within the pause waits for it, and CRC-32 took six times as long.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return xxh3_64_intdigest(view)


def open_new(path: Path) -> BinaryIO:
    """Makes a file that only this user reads, and opens it for writing; raises FileExistsError for
    one that is there, also for a link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def require_room(folder: Path, needed: int) -> None:
    """Raises OSError if `folder` has not `needed` bytes free."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if needed > free:
        takes, has = in_gib(needed, free)
        raise OSError(
            f"{folder} has {has} GiB free and the weights take {takes} GiB (twice that while a new "
            "version replaces the old one). Enlarge it (`mount -o remount,size=...` for /dev/shm)."
        )
