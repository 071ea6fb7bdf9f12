"""What `ckpt_path="last"` means: the newest checkpoint of the run that the trainer's own settings name.

Lightning looks into one folder, for names that begin with `last`, and trains from scratch if there is none. A new run
has a new folder, so it would nearly always do so.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lrl.runtime.config_errors import ConfigError, fault

SHOWN = 5
"""Runs that are named when the one that was asked for has no checkpoint."""


def newest_checkpoint(trainer: L.Trainer) -> str | None:
    """The checkpoint with the most steps, and of several the one written last.

    It is looked for in `ModelCheckpoint.dirpath`, or in the folder of the logger's `version`. Without a `version` the
    run is the one of the logger's `name` that has written a checkpoint last.

    Returns:
        Its path. None, with a fault that names what there is, if there is no checkpoint.
    """
    folders, named = _folders(trainer)
    found = {folder: list(folder.glob("*.ckpt")) for folder in folders}
    runs = [paths for paths in found.values() if paths]
    if not runs:
        _say_what_there_is(trainer, folders[0], named)
        return None
    candidates = [path for paths in runs for path in paths] if named else max(runs, key=_last_written)
    return str(max(candidates, key=lambda path: (_steps(path), path.stat().st_mtime)))


def check_best(trainer: L.Trainer, ckpt_path: object) -> None:
    """The word `best` means something in this Trainer.

    Raises:
        ConfigError: This Trainer has not saved a checkpoint; Lightning would speak of its `ModelCheckpoint`.
    """
    if ckpt_path == "best" and not getattr(trainer.checkpoint_callback, "best_model_path", ""):
        raise ConfigError(
            "ckpt_path is 'best', and this Trainer has saved no checkpoint that could be the best one. Give 'last', or "
            "the path of the checkpoint."
        )


def _folders(trainer: L.Trainer) -> tuple[list[Path], bool]:
    """Where the run's checkpoints may be, and whether the settings name the run; if not, one folder for each run."""
    given = [callback.dirpath for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    if any(given):
        return [Path(folder) for folder in given if folder], True
    if not trainer.loggers:
        return [Path(trainer.default_root_dir) / "checkpoints"], True
    version = getattr(trainer.loggers[0], "_version", None)  # `version` itself would begin a new one
    if version is not None:
        return [_runs(trainer) / (version if isinstance(version, str) else f"version_{version}") / "checkpoints"], True
    return sorted(_runs(trainer).glob("*/checkpoints")) or [_runs(trainer)], False


def _runs(trainer: L.Trainer) -> Path:
    """The folder of all runs of the first logger's name, as `ModelCheckpoint` sees it."""
    logger = trainer.loggers[0]
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)


def _last_written(paths: list[Path]) -> float:
    return max(path.stat().st_mtime for path in paths)


def _steps(path: Path) -> int:
    """Steps done in a checkpoint, by its name or else by what is in it; -1 if that cannot be read."""
    if in_name := re.search(r"step=(\d+)", path.name):
        return int(in_name[1])
    try:
        file = path / "meta.pt" if path.is_dir() else path
        return int(torch.load(file, map_location="cpu", weights_only=True, mmap=True)["global_step"])
    except (RuntimeError, OSError, EOFError, KeyError, TypeError, pickle.UnpicklingError):
        return -1


def _say_what_there_is(trainer: L.Trainer, folder: Path, named: bool) -> None:
    beside = sorted(_runs(trainer).glob("*/checkpoints/*.ckpt")) if named and trainer.loggers else []
    runs = list(dict.fromkeys(path.parent.parent.name for path in beside))
    there = f" Versions with checkpoints: {', '.join(runs[:SHOWN])}{' ...' if runs[SHOWN:] else ''}." if runs else ""
    fault(
        f"ckpt_path is 'last', and there is no checkpoint in {str(folder)!r}.{there} Name the run by "
        "trainer.logger.version, give the path of a checkpoint, or leave ckpt_path out."
    )
