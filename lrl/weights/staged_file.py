"""The file in which a trainer stages a version of its weights."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lrl.weights.checksum import checksum

SHARED_MEMORY = Path("/dev/shm")


def stage_file(tensors: Mapping[str, Tensor], file: Path) -> int:
    """Writes contiguous CPU tensors as safetensors next to `file`, then renames; returns the checksum.

    A rename replaces an older file at once, so a reader never sees half of one.

    Raises:
        OSError: There is no room.
    """
    require_room(file.parent, sum(tensor.nbytes for tensor in tensors.values()))
    draft = file.with_suffix(".draft")
    try:
        save_file(dict(tensors), draft)
        found = checksum(draft)
        draft.rename(file)
    except SafetensorError as error:  # its form of "no space left", when something else filled the folder meanwhile
        draft.unlink(missing_ok=True)
        raise OSError(f"{draft} could not be written: {error}") from error
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return found


def require_room(folder: Path, needed: int) -> None:
    """Raises OSError if `folder` has not `needed` bytes free."""
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if needed > free:
        raise OSError(
            f"{folder} has {free / 2**30:.2f} GiB free and the weights take {needed / 2**30:.2f} GiB (twice that while "
            "a new version replaces the old one). Enlarge it (`mount -o remount,size=...` for /dev/shm)."
        )


def too_little_room(transport: str, needed: int, free: int) -> str:
    """Returns why `free` bytes of shared memory are too few for what `transport` stores at most; empty if they are
    enough."""
    if needed <= free:
        return ""
    return (
        f"{SHARED_MEMORY} has {free / 2**30:.2f} GiB free, and strategy.weight_transfer {transport} takes "
        f"{needed / 2**30:.2f}. Enlarge it: `mount -o remount,size={needed // 2**30 + 1}G {SHARED_MEMORY}`, or "
        "`docker run --shm-size` for a container."
    )
