"""The folder of a run's files, the lock that keeps other live runs out of it, and the metrics that
are in it already.

Two runs in one folder would overwrite each other's checkpoints and logs, and mix their metrics.
"""

import csv
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lrl.errors import ConfigError

log = logging.getLogger(__name__)


def run_folder(trainer: L.Trainer) -> Path:
    """Returns the folder of the first logger's run, or else the trainer's own.

    A logger without a folder for each run (W&B, MLflow) gets one by the rule of `ModelCheckpoint`:
    `save_dir/name/version`. They know the version on rank 0 alone; on another rank, whose only file
    there is the log of its generators, it is their `save_dir`.
    """
    # Not `trainer.log_dir`: rank 0 broadcasts it at every read, so all ranks would have to read it
    # together.
    loggers = [logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)]
    if not loggers:
        return Path(trainer.default_root_dir)
    first = loggers[0]
    if log_dir := getattr(first, "log_dir", None):
        return Path(log_dir)
    getattr(first, "experiment", None)  # begins the run, which names the version
    folder = Path(first.save_dir or trainer.default_root_dir)
    if first.version is None:
        return folder
    version = first.version if isinstance(first.version, str) else f"version_{first.version}"
    return folder / str(first.name) / version


def continue_logs(trainer: L.Trainer, step: int) -> None:
    """Has the loggers keep what their folders have, but for the steps from `step` on, which the run
    trains again; all of it, if that is below 0."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            _continue_csv(logger, step)
        elif isinstance(logger, TensorBoardLogger) and step >= 0:
            _forget_events(logger, step)


def _continue_csv(logger: CSVLogger, step: int) -> None:
    """Writes the kept rows into a new file: Lightning removes the one that it finds."""
    path = Path(logger.log_dir, "metrics.csv")
    if not path.exists():
        return
    with path.open(newline="") as file:
        # A line that a crash cut short lacks its last values.
        rows = [row for row in csv.DictReader(file) if None not in row.values()]
    logger._experiment = None
    logger.experiment.metrics = [row for row in rows if step < 0 or int(row["step"]) < step]
    logger.save()


def _forget_events(logger: TensorBoardLogger, step: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    writer = logger.experiment._get_file_writer()  # opens it again after an earlier fit
    writer.add_event(Event(step=step, session_log=start))


class RunFolderLock:
    """One process's lock on a run's folder: the kernel releases it at any end of the process.

    The lock is on the folder itself. A lock file would stay, and a logger would take the folder for
    an earlier run's.
    """

    def __init__(self) -> None:
        self._folder: int | None = None

    def acquire_for(self, trainer: L.Trainer) -> None:
        """Makes and locks the folder of a run; one whose logger has no version gets the next free
        number, also if others take theirs at this moment. See `acquire`."""
        numbered: list[Any] = [
            one for one in trainer.loggers if getattr(one, "_version", "") is None
        ]
        tried = None
        while True:
            # All of them before there is a folder: loggers in one place get the same number.
            for logger in numbered:
                logger._version = None
                _ = logger.version  # takes the next free number
            folder = run_folder(trainer)
            is_new = bool(numbered) and folder != tried
            try:
                return self.acquire(folder, is_new)
            except (ConfigError, FileExistsError):  # another run has made it since
                if not is_new:  # or its name has no number
                    raise
            tried = folder

    def acquire(self, folder: Path, is_new: bool = False) -> None:
        """Makes and locks `folder` and releases the last; ConfigError if a live run has it."""
        self.release()
        folder.mkdir(parents=True, exist_ok=not is_new)  # decides also where there are no locks
        opened = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folder = opened
        except BlockingIOError:
            os.close(opened)
            raise ConfigError(
                f"The run folder {str(folder)!r} is that of a live run. Leave the logger's version "
                "out, give this run a folder of its own (trainer.logger or "
                "trainer.default_root_dir), or end that one."
            ) from None
        except OSError as error:  # a file system without locks
            os.close(opened)
            log.warning("%s cannot be locked: %s. Let no other run write there.", folder, error)

    def release(self) -> None:
        """Unlocks the folder; idempotent."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
