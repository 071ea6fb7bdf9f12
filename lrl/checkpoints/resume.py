"""A resume: which checkpoint a run continues.

For `ckpt_path="last"` Lightning looks for names that begin with `last` in the new run's own folder,
where there is none yet, and so trains from scratch. Without a `ckpt_path` it continues what any job
of SLURM has left where the run starts.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lrl.checkpoints.checkpoint_file import READ_ERRORS
from lrl.errors import ConfigError
from lrl.system.signals import run_of_job

SLURM_RUN = "slurm_run"
"""Entry of a checkpoint: the command and the job of SLURM that have written it."""


def find_by_lrl(trainer: L.Trainer, note: Callable[[str | None], None]) -> None:
    """Makes `trainer` find the checkpoint that is named, by Lightning's rules except for `last`
    (`newest_checkpoint`), and has `note` called with its path, or None.

    A job that SLURM has requeued continues its own newest checkpoint, if there is one, whatever is
    named: its first start has begun with that.
    """
    connector: Any = trainer._checkpoint_connector
    # Of the class: an earlier call of this function may have set the instance's.
    lightnings = partial(type(connector)._parse_ckpt_path, connector)

    def find(verb: TrainerFn, ckpt_path: Any, **how: bool) -> Any:
        found = _of_requeued_job(trainer) if verb == TrainerFn.FITTING else None
        if found is None and ckpt_path == "last":
            found = newest_checkpoint(trainer)
        elif found is None and (ckpt_path is not None or not how["model_provided"]):
            found = lightnings(verb, ckpt_path, **how)
        note(None if found is None else str(found))
        return found

    connector._parse_ckpt_path = find


def newest_checkpoint(trainer: L.Trainer) -> str:
    """Returns the path of the checkpoint with the most steps, and of several the one written last.

    Searches `ModelCheckpoint.dirpath`, or the folder of the logger's `version`. Without a `version`
    the run is the one of the logger's `name` that has written a checkpoint last. Raises
    ConfigError if there is none.
    """
    folders = _runs(trainer)
    runs = [paths for folder in folders if (paths := _checkpoints(folder))]
    if not runs:
        raise ConfigError(
            f"ckpt_path is 'last', and there is no checkpoint in {str(folders[0][0])!r}. Name the "
            "run by trainer.logger.version, give the path of a checkpoint, or leave ckpt_path out."
        )
    return _newest(max(runs, key=lambda paths: max(path.stat().st_mtime for path in paths)))


def _of_requeued_job(trainer: L.Trainer) -> str | None:
    """Returns the newest checkpoint that earlier starts of this SLURM job have written, if any."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return None
    written = [path for run in _runs(trainer) for path in _checkpoints(run)]
    own = [path for path in written if _read(path, SLURM_RUN) == run_of_job()]
    return _newest(own) if own else None


def _newest(checkpoints: list[Path]) -> str:
    return str(max(checkpoints, key=lambda path: (steps_done(path), path.stat().st_mtime)))


def _checkpoints(folders: list[Path]) -> list[Path]:
    return [path for folder in folders for path in folder.glob("*.ckpt")]


def _runs(trainer: L.Trainer) -> list[list[Path]]:
    """Returns the checkpoint folders of each run that may be meant: one, if a setting names it."""
    callbacks = trainer.checkpoint_callbacks
    named = [one.dirpath for one in callbacks if isinstance(one, ModelCheckpoint)]
    if folders := [Path(folder) for folder in named if folder]:
        return [folders]
    if not trainer.loggers:
        return [[Path(trainer.default_root_dir) / "checkpoints"]]
    logger = trainer.loggers[0]
    # The folder of all runs of the logger's name, by the rule of `ModelCheckpoint`.
    runs = Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
    # Reading `version` would begin a new one.
    version = getattr(logger, "_version", None)
    if version is None:
        return [[folder] for folder in sorted(runs.glob("*/checkpoints"))] or [[runs]]
    name = version if isinstance(version, str) else f"version_{version}"
    return [[runs / name / "checkpoints"]]


def steps_done(path: Path) -> int:
    """Returns the steps done, from a checkpoint's name or else its content; -1 if unreadable."""
    if in_name := re.search(r"step=(\d+)", path.name):
        return int(in_name[1])
    steps = _read(path, "global_step")
    return -1 if steps is None else int(steps)


def _read(path: Path, name: str) -> Any:
    """Returns an entry of a checkpoint; None if it has none, or cannot be read."""
    try:
        file = path / "meta.pt" if path.is_dir() else path
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)[name]
    except READ_ERRORS:
        return None
