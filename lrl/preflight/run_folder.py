"""Where a run writes: folders that can be made, and none that belongs to something else."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lrl.runtime.config_errors import fault

if TYPE_CHECKING:
    from lrl.preflight.protocols import Policy

log = logging.getLogger(__name__)


def check(trainer: L.Trainer, policy: Policy) -> None:
    """Every folder of the run can be written, and the policy that is exported does not replace the one it began as."""
    for setting, folder in folders(trainer):
        there = nearest(folder)
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            fault(f"{setting} is {str(folder)!r}, and {there} cannot be written ({error.strerror}). Choose another.")
        if setting == "Export.folder" and _same(folder, Path(policy.model)):
            fault(
                f"Export.folder is {str(folder)!r}, the model's own folder: it would be written over. Choose another."
            )
    if trainer.state.fn == "fit":
        _warn_of_another_run(trainer)


def _same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def folders(trainer: L.Trainer) -> Iterator[tuple[str, Path]]:
    """Each setting that names a folder to write to, with the folder; it need not exist."""
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
    """`folder`, or the lowest one above it that exists."""
    absolute = folder.expanduser().absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def _warn_of_another_run(trainer: L.Trainer) -> None:
    """A run that is not resumed and writes beside another's checkpoints mixes the metrics of both."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    for logger in trainer.loggers:
        folder = getattr(logger, "log_dir", None)
        if data.resumes_from is None and folder is not None and any(Path(folder).glob("checkpoints/*")):
            log.warning(
                "%s has the checkpoints of another run, whose metrics this one will write into. Leave the logger's "
                "version out, or continue that run with --ckpt_path.",
                folder,
            )
