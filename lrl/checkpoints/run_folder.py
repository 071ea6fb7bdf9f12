"""The folder of a run's files, the lock that keeps other live runs out of it, and the metrics that
are in it already.

Two runs in one folder would overwrite each other's checkpoints and logs, and mix their metrics.
"""

import csv
import fcntl
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lrl.errors import ConfigError

log = logging.getLogger(__name__)

BEGINNINGS = ("config.yaml", "hparams.yaml", "events.out.tfevents.*")
"""What loggers and `lrl fit` write before a run starts anything."""


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
        self._made: list[Path] = []
        """The folder, if this run has made it, and the parents that it had to make."""

    def acquire_for(self, trainer: L.Trainer) -> None:
        """Makes and locks the folder of a run; one whose logger has no version gets the next free
        number, also if others take theirs at this moment. See `acquire`."""
        # Reading `version` takes the next free number.
        numbered: list[Any] = [
            one for one in trainer.loggers if getattr(one, "_version", "") is None
        ]
        if not numbered or numbered[0] is not trainer.loggers[0]:
            self.acquire(run_folder(trainer))
            return
        self.release()
        tried = None
        while not self._made:  # another run has made the last one since
            for logger in numbered:
                logger._version = None
            # All of them before there is a folder: loggers in one place get the same number.
            for logger in numbered:
                _ = logger.version
            folder = run_folder(trainer)
            if folder == tried:  # its name has no number: that of an earlier run
                break
            self._made = _make(folder)
            tried = folder
        self._lock(folder)

    def acquire(self, folder: Path) -> None:
        """Makes and locks `folder` and releases the last; ConfigError if a live run has it."""
        self.release()
        self._made = _make(folder)
        self._lock(folder)

    def _lock(self, folder: Path) -> None:
        opened = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._folder = opened
        except BlockingIOError:
            os.close(opened)
            raise ConfigError(
                f"The run folder {str(folder)!r} is that of a live run ({_holder(folder)}). Leave "
                "the logger's version out, give this run a folder of its own (trainer.logger or "
                "trainer.default_root_dir), or end that one."
            ) from None
        except OSError as error:
            os.close(opened)
            text = "%s cannot be locked (%s): let no other run write there."
            log.warning(text, folder, error.strerror)

    def keep(self) -> None:
        """Has the folder stay, also if nothing more is written: the run has begun."""
        self._made = []

    def discard(self) -> None:
        """Removes the folder, if this run has made it, has not begun, and has written nothing but
        `BEGINNINGS`; and its parents, if this run has made them and nothing else is there."""
        written = list(self._made[0].iterdir()) if self._made else []
        if all(any(map(path.match, BEGINNINGS)) for path in written):
            for path in written:
                path.unlink()
            with suppress(OSError):  # of the first parent that is not empty
                for folder in self._made:
                    folder.rmdir()
            self._made = []

    def release(self) -> None:
        """Unlocks the folder; idempotent."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
        self._made = []


def _make(folder: Path) -> list[Path]:
    """Makes a folder; returns it and the parents made for it; empty if it exists."""
    absent = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return []
    return [folder, *absent]


def _holder(folder: Path) -> str:
    """Returns the process that holds the lock, as far as this machine's kernel knows it."""
    inode = folder.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "FLOCK" in words and any(word.endswith(f":{inode}") for word in words):
            return f"process {words[words.index('FLOCK') + 3]} on {socket.gethostname()}"
    return "a process that this machine does not see"
