"""Atomic checkpoints; one that cannot be written does not end the run.

Lightning writes into the system's temporary folder and moves the file from there. Across file
systems the move is a copy: a run killed within it leaves half a checkpoint in the place of the last
good one. Here the bytes go into a file next to the checkpoint, which is then renamed. They are not
gathered in memory first.

What `torch.load(weights_only=True)` could not read again is left out, and the log names it.

A failed write is a warning. Lightning does not learn of it and would remove the older checkpoint
that the new one was to replace; that one is kept until a newer one is written.
"""

import logging
import os
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrl.checkpoints.readable_state import readable
from lrl.system.best_effort import os_error
from lrl.system.malloc_trim import trim_heap

log = logging.getLogger(__name__)

ADVICE = "Only numbers, texts, tensors, and lists and dicts of them can be read from a checkpoint"
UNFINISHED = ".unfinished"
"""Suffix of a file that is being written; after a crash it may be deleted."""


class CheckpointFile(TorchCheckpointIO):
    """Lightning's checkpoint IO with atomic writes, and the state of the last ones."""

    def __init__(self) -> None:
        self.newest: str | None = None
        """Path of the last checkpoint that was written."""
        self.newest_step = -1
        """Optimizer steps done in it; -1 before there is one."""
        self.refused: OSError | None = None
        """The error of the latest write; None if it succeeded."""
        self._outdated: list[Any] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Writes `checkpoint` to `path`; logs an OSError and keeps it in `refused`."""
        step = checkpoint["global_step"]
        try:
            self._write(checkpoint, path, storage_options)
        except (OSError, RuntimeError) as error:
            self.refused = reason = os_error(error)
            if reason is None:
                raise
            last = f"The last good one is {self.newest}." if self.newest else "There is none yet."
            warn = rank_zero_only(log.warning)  # all ranks come here if each writes a part
            warn(f"The checkpoint of step {step} cannot be written to {path}: {reason}. {last}")
            return
        self.refused = None
        self.newest = str(path)
        self.newest_step = step
        while self._outdated:
            super().remove_checkpoint(self._outdated.pop())
        trim_heap()  # outside of a step, and at every checkpoint: fragments cannot add up

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a checkpoint, or defers it if its successor could not be written."""
        if self.refused is None:
            super().remove_checkpoint(path)
        else:
            self._outdated.append(path)

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        checkpoint = readable_part(checkpoint)
        if not isinstance(url_to_fs(str(path))[0], LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(LocalFileSystem._strip_protocol(str(path)))
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(target.name + UNFINISHED)
        try:
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)


def readable_part(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint without its unreadable parts, which the log names."""
    whole, faults = readable(checkpoint)
    if faults:
        log.error(
            "The checkpoint of step %d is saved without %s. %s: return those from state_dict and "
            "on_save_checkpoint.",
            *(checkpoint["global_step"], ", ".join(map(str, faults)), ADVICE),
        )
    return whole
