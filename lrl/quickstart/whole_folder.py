"""A folder of a policy that appears complete or not at all, whoever asks for it at the same time."""

import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

LOCK_TIMEOUT = 900.0
"""Seconds. Nothing takes longer than two minutes to make: a longer wait means a stuck process."""


def find_or_make(folder: Path, found: Callable[[Path], bool], make: Callable[[Path], None]) -> Path:
    """Returns `folder`, made if it is not there.

    All ranks may call it at once: the first one makes the folder, the others wait and find it.

    Args:
        folder: The folder.
        found: Tells whether the folder holds what is wanted; removes what may be made again, and
            raises if it holds anything else.
        make: Fills a folder of another name, which does not exist; it gets its name when it is
            full.

    Raises:
        filelock.Timeout: Another process has held the folder's lock for 15 minutes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=LOCK_TIMEOUT):
        if not found(folder):
            unfinished = folder.with_name(f"{folder.name}.unfinished")
            # This process has the lock, so the process that wrote it was killed.
            if unfinished.exists():
                shutil.rmtree(unfinished)
            make(unfinished)
            unfinished.rename(folder)
    return folder
