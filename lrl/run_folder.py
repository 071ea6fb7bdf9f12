"""Where a run puts its files."""

from __future__ import annotations

from pathlib import Path

import lightning as L


def run_folder(trainer: L.Trainer) -> Path:
    """The folder of the first logger, or else the trainer's own.

    It is `trainer.log_dir` of rank 0, which that one broadcasts at every look: all ranks would have to look together.
    """
    first = trainer.loggers[0] if trainer.loggers else None
    return Path(getattr(first, "log_dir", None) or getattr(first, "save_dir", None) or trainer.default_root_dir)
