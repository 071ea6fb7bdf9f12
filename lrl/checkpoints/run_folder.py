"""The folder of a run's files: the lock that keeps other live runs out of it, the metrics that are in
it already, and files in it that other processes trust.

Two runs in one folder would overwrite each other's checkpoints and logs, and mix their metrics.
"""

from __future__ import annotations

import csv
import fcntl
import json
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lrl.errors import ConfigError, UntrustedFile

if TYPE_CHECKING:  # Lightning takes seconds, and `lrl join` reads a file here
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

T = TypeVar("T")

log = logging.getLogger(__name__)


def run_folder(trainer: L.Trainer) -> Path:
    """Returns the folder of the first logger's run, or else the trainer's own.

    A logger without a folder for each run (W&B, MLflow) gets one by the rule of `ModelCheckpoint`:
    `save_dir/name/version`. They know the version on rank 0 alone; on another rank, whose only file
    there is the log of its generators, it is their `save_dir`.
    """
    from lightning.pytorch.loggers.logger import DummyLogger

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
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

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


def lock_run_folder(trainer: L.Trainer) -> int:
    """Makes and locks the folder of a run; one whose logger has no version gets the next free number,
    also if others take theirs at this moment. Raises ConfigError if a live run has it.

    Returns the open folder: its closing releases the lock, and so does any end of the process. The
    lock is on the folder itself. A lock file would stay, and a logger would take the folder for an
    earlier run's.
    """
    numbered: list[Any] = [one for one in trainer.loggers if getattr(one, "_version", "") is None]
    tried = None
    while True:
        # All of them before there is a folder: loggers in one place get the same number.
        for logger in numbered:
            logger._version = None
            _ = logger.version  # takes the next free number
        folder = run_folder(trainer)
        is_new = bool(numbered) and folder != tried
        try:
            return lock(folder, is_new)
        except (ConfigError, FileExistsError):  # another run has made it since
            if not is_new:  # or its name has no number
                raise
        tried = folder


def lock(folder: Path, is_new: bool = False) -> int:
    """Makes, opens and locks `folder`; ConfigError if a live run has it."""
    folder.mkdir(parents=True, exist_ok=not is_new)  # decides also where there are no locks
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise ConfigError(
            f"The run folder {str(folder)!r} is that of a live run. Leave the logger's version out, "
            "give this run a folder of its own (trainer.logger or trainer.default_root_dir), or end "
            "that one."
        ) from None
    except OSError as error:  # a file system without locks
        log.warning("%s cannot be locked: %s. Let no other run write there.", folder, error)
    return opened


@dataclass
class OwnerOnlyFolder:
    """A folder of small JSON files between processes of one user: written atomically, and trusted only
    if this user owns file and folder, and their modes exclude all others. The check uses the open
    file, not its name. The folder may not exist yet."""

    path: Path

    def make(self) -> None:
        """Makes or empties the folder; raises OSError if it cannot be this user's alone."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            self.path.chmod(0o700)
        self.clear()

    def clear(self) -> None:
        """Raises OSError if a file stays."""
        self.check()
        for file in self.path.iterdir():
            file.unlink(missing_ok=True)

    def read(self, name: str, kind: type[T]) -> T:
        """Returns a `kind` made of a file's fields; raises FileNotFoundError or UntrustedFile."""
        self.check()
        path = self.path / name
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            _check_owner(path, os.fstat(file.fileno()), stat.S_ISREG)
            try:
                return kind(**json.load(file))
            except (TypeError, ValueError) as error:
                raise UntrustedFile(
                    f"{path} is not what this release of lrl writes ({error}): use the release of "
                    "the run."
                ) from error

    def write(self, name: str, fields: dict[str, Any]) -> None:
        draft = self.path / f".{secrets.token_hex(8)}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(fields, file)
        draft.rename(self.path / name)

    def check(self) -> None:
        """Raises UntrustedFile unless the folder is this user's alone."""
        _check_owner(self.path, self.path.lstat(), stat.S_ISDIR)


def _check_owner(path: Path, status: os.stat_result, is_kind: Any) -> None:
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        kind = "folder" if is_kind is stat.S_ISDIR else "file"
        raise UntrustedFile(
            f"{path} is not trusted: it must be a {kind} of this user (id {os.geteuid()}), "
            f"closed to all others (mode 0700 or 0600); it is of user {status.st_uid}, with mode "
            f"{stat.S_IMODE(status.st_mode):04o}. Remove it if you did not make it."
        )
