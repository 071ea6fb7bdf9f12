"""Checks of the folders that a run writes to: writable, and not in other use."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lrl.checkpoints.run_folder import without_version
from lrl.system.byte_counts import in_gib
from lrl.system.config_errors import fault

if TYPE_CHECKING:
    from lrl.preflight.policy import Policy

log = logging.getLogger(__name__)

COPIES_PER_CHECKPOINT = 3
"""Copies of the weights in a checkpoint: themselves and the two moments."""


def check_folders(trainer: L.Trainer, policy: Policy) -> None:
    """Checks that every folder of the run can be written, and that the export does not overwrite
    the first policy."""
    for setting, folder in folders(trainer):
        there = nearest(folder)
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            fault(
                f"{setting} is {str(folder)!r}, and {there} cannot be written ({error.strerror}). "
                "Choose another."
            )
        first = Path(policy.model)
        if (
            setting == "Export.folder"
            and folder.exists()
            and first.exists()
            and folder.samefile(first)
        ):
            fault(
                f"Export.folder is {str(folder)!r}, the model's own folder, which it would "
                "replace. Choose another."
            )
    if trainer.state.fn == ("fit") and trainer.datamodule.resumes_from is None:  # type: ignore[attr-defined]
        new = without_version(trainer)
        for logger in trainer.loggers:
            used = None if logger in new else getattr(logger, "log_dir", None)
            if used is not None and any(Path(used).glob("checkpoints/*")):
                log.warning(
                    "%s has the checkpoints of another run, and this one will add its metrics "
                    "there. Leave the logger's version out, or continue that run with --ckpt_path.",
                    used,
                )


def folders(trainer: L.Trainer) -> Iterator[tuple[str, Path]]:
    """Yields each setting that names a folder to write to, with the folder; it need not exist."""
    from lrl.callbacks.base import find_all
    from lrl.callbacks.export import Export

    saved = [logger.save_dir for logger in trainer.loggers if logger.save_dir is not None]
    yield from (("trainer.logger.save_dir", Path(folder)) for folder in saved)
    if not saved:
        yield "trainer.default_root_dir", Path(trainer.default_root_dir)
    for checkpoints in find_all(trainer, ModelCheckpoint):
        if checkpoints.dirpath is not None and "://" not in str(checkpoints.dirpath):
            yield "ModelCheckpoint.dirpath", Path(checkpoints.dirpath)
    for export in find_all(trainer, Export):
        if export.folder is not None:
            yield "Export.folder", Path(export.folder)


def nearest(folder: Path) -> Path:
    """Returns `folder`, or its nearest parent that exists."""
    absolute = folder.expanduser().absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def check_disk(trainer: L.Trainer, weights: int) -> None:
    """Checks that one checkpoint fits; warns below two, since a new one is written before the old
    one goes."""
    checkpoints = [
        callback
        for callback in trainer.checkpoint_callbacks
        if hasattr(callback, "save_weights_only")
    ]
    if not checkpoints:
        return
    needed = (
        max(1 if callback.save_weights_only else COPIES_PER_CHECKPOINT for callback in checkpoints)
        * weights
    )
    setting, folder = next(iter(folders(trainer)))
    disk = shutil.disk_usage(nearest(folder))
    free, taken = in_gib(disk.free, needed)
    if disk.total and needed > disk.free:
        fault(
            f"{setting} is {str(folder)!r}, where {free} GiB are free, and a checkpoint takes "
            f"{taken}. Free some, choose another folder, or set ModelCheckpoint.save_weights_only."
        )
    elif disk.total and 2 * needed > disk.free:
        log.warning("A checkpoint takes %s GiB and %s are free in %s.", taken, free, folder)
