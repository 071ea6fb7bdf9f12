"""A staging folder without room: a file system of one MiB in the place of /dev/shm, for this process alone."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

from lrl.weights import shared_memory

SIZE = "1m"


@contextmanager
def full_memory(notice: bool) -> Iterator[None]:
    """Let the weights be staged where they do not fit.

    Where nothing may be mounted the look at the free space finds none instead.

    Args:
        notice: Whether the free space says so beforehand; if not, the write itself runs out of room.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lrl-full-")))
        if os.geteuid() == 0 and mounted(folder):
            stack.callback(subprocess.run, ["umount", str(folder)], check=True)
            stack.enter_context(mock.patch.object(shared_memory, "SHARED_MEMORY", folder))
            if not notice:
                stack.enter_context(mock.patch.object(shared_memory, "_require_room"))
        else:
            stack.enter_context(mock.patch.object(shared_memory, "_require_room", _refuse))
        yield


def mounted(folder: Path) -> bool:
    """Mount the small file system; False where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


def _refuse(folder: Path, needed: int) -> None:
    """Stands in for the look at the free space; spares the second-best folder."""
    if folder == shared_memory.SHARED_MEMORY:
        raise OSError(f"{folder} has 0 bytes free")
