"""Checkpoints of a sharded policy: a folder into which each rank writes its part
(torch.distributed.checkpoint).

`meta.pt` in it, by rank 0, has all but the weights and the optimizer's state: Lightning knows the
folder by it. The folder gets its name when it is whole.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lrl.checkpoints.checkpoint_file import UNFINISHED, CheckpointFile, readable_part
from lrl.system.output import os_error
from lrl.system.ranks import explain_broken_collective

META = "meta.pt"
WEIGHTS = "state_dict."
"""Prefix of the weights' names in the folder's index."""
REPLACED_SUFFIX = ".older"
"""Suffix of a folder that is being replaced; after a crash it is the last good one."""


class CheckpointFolder(CheckpointFile):
    """`CheckpointFile` for parts: all ranks save together; if one cannot, all are refused."""

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        target = Path(path)
        leads = dist.get_rank() == 0
        unfinished = target.with_name(target.name + UNFINISHED)
        older = target.with_name(target.name + REPLACED_SUFFIX)
        whole = dict(checkpoint)
        parts = {"state_dict": whole.pop("state_dict")}
        for number, state in enumerate(whole.pop("optimizer_states", [])):
            parts[f"optimizer_{number}"] = state
        try:
            save_parts(parts, unfinished)
            if leads:
                torch.save(readable_part(whole), unfinished / META)
                if target.exists():
                    target.replace(older)
                unfinished.replace(target)
                _remove(older)
        finally:
            if leads:
                _remove(unfinished)


def save_parts(parts: dict[str, Any], folder: Path) -> None:
    """Writes the parts of all ranks over what a killed run has left; raises one rank's error on all
    ranks, an OSError first."""
    try:
        with explain_broken_collective():
            dcp.save(parts, storage_writer=dcp.FileSystemWriter(folder, overwrite=True))
    except CheckpointException as error:
        # It is neither an Exception nor of the class of its cause.
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if os_error(cause)), causes[0]) from error


def is_checkpoint_folder(path: Path) -> bool:
    return (path / META).is_file()


def shapes(folder: Path) -> dict[str, torch.Size]:
    """Returns the shape of each weight, without reading any."""
    return {name.removeprefix(WEIGHTS): entry.size for name, entry in _index(folder).items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Reads the weights whole, on the CPU, in one process."""
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _index(folder).items()
    }
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(WEIGHTS): weight for name, weight in found.items()}


def _index(folder: Path) -> dict[str, TensorStorageMetadata]:
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: entry
        for name, entry in entries.items()
        if name.startswith(WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
