"""The folder of a run's files, and the lock that keeps other live runs out of it.

Two runs in one folder would overwrite each other's checkpoints and generator logs, and mix their
metrics.
"""

import fcntl
import logging
import os
import socket
from pathlib import Path

import lightning as L
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
    first = next(
        (logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)), None
    )
    if first is None:
        return Path(trainer.default_root_dir)
    if log_dir := getattr(first, "log_dir", None):
        return Path(log_dir)
    getattr(first, "experiment", None)  # begins the run, which names the version
    folder = Path(first.save_dir or trainer.default_root_dir)
    if first.version is None:
        return folder
    version = first.version if isinstance(first.version, str) else f"version_{first.version}"
    return folder / str(first.name) / version


class RunFolderLock:
    """One process's lock on a run's folder: the kernel releases it at any end of the process.

    The lock is on the folder itself. A lock file would stay, and a logger would take the folder for
    an earlier run's.
    """

    def __init__(self) -> None:
        self._folder: int | None = None

    def acquire(self, folder: Path) -> None:
        """Makes and locks `folder` and releases the previous one; raises ConfigError if another
        live run has it."""
        self.release()
        folder.mkdir(parents=True, exist_ok=True)
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
            log.warning(
                "%s cannot be locked (%s): make sure that no other run writes there.",
                folder,
                error.strerror,
            )

    def release(self) -> None:
        """Unlocks the folder; idempotent."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def _holder(folder: Path) -> str:
    """Returns the process that holds the lock, as far as this machine's kernel knows it."""
    inode = folder.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "FLOCK" in words and any(word.endswith(f":{inode}") for word in words):
            return f"process {words[words.index('FLOCK') + 3]} on {socket.gethostname()}"
    return "a process that this machine does not see"
