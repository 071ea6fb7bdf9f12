"""Atomic checkpoints; one that cannot be written does not end the run.

Lightning moves a checkpoint from the system's temporary folder, which across file systems is a
copy: a run killed during it leaves half a checkpoint in place of the last good one. And after a
failed write it would remove the older checkpoint that the new one was to replace.

Checkpoints are read by `torch.load` with `weights_only=True`, which refuses a whole file for one
object that is neither plain nor a tensor. So such objects are left out, and the log names them.
"""

import io
import logging
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn import Parameter

from lrl.system.machine import trim_heap
from lrl.system.output import os_error

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""Suffix of a file that is being written."""
READ_ERRORS = (
    *(RuntimeError, OSError, EOFError, KeyError, TypeError, AttributeError),
    pickle.UnpicklingError,
)
"""Errors of `torch.load`, and of a look into its result, for a file that is no checkpoint."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, Parameter)


class CheckpointFile(TorchCheckpointIO):
    """Lightning's checkpoint IO with atomic writes, and the state of the last ones."""

    def __init__(self) -> None:
        self.newest: str | None = None
        """Path of the last checkpoint that was written."""
        self.newest_step = -1
        """Steps done in it."""
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


def readable_part(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint without its unreadable parts, which the log names.

    A part is an entry of the checkpoint, or of a dict in it, such as the state of one callback: half
    of it would be restored as if it were whole.
    """
    whole, faults = dict(checkpoint), list[str]()
    for name, entry in checkpoint.items():
        if isinstance(entry, dict):  # an OrderedDict, too: the policy's weights
            whole[name] = {key: part for key, part in entry.items() if is_readable((key, part))}
            faults += [f"{name}.{key}" for key in entry if key not in whole[name]]
        elif not is_readable(entry):
            del whole[name]
            faults.append(name)
    if faults:
        log.error(
            "The checkpoint of step %d is saved without %s. Only numbers, texts, tensors, and lists "
            "and dicts of them can be read from a checkpoint: return those from state_dict and "
            "on_save_checkpoint.",
            *(checkpoint["global_step"], ", ".join(faults)),
        )
    return whole


def is_readable(state: Any) -> bool:
    """Whether `torch.load` with `weights_only=True` reads it."""
    kind = type(state)
    if kind in PLAIN:
        return True
    if kind in (dict, OrderedDict):
        return all(is_readable(key) and is_readable(value) for key, value in state.items())
    if kind in (list, tuple, set):
        return all(map(is_readable, state))
    # Tried: users may have allowed classes of their own (`torch.serialization.add_safe_globals`).
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001 - any class may say in any way that it cannot be pickled
        return False
    return True
