"""Where a run puts its files, and that no other live run puts its own there.

Two runs in one folder would write over each other's checkpoints and generator logs, and mix their metrics.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger

from lrl.runtime.config_errors import ConfigError

log = logging.getLogger(__name__)


def run_folder(trainer: L.Trainer) -> Path:
    """The folder of the first logger, or else the trainer's own.

    It is `trainer.log_dir` of rank 0, which that one broadcasts at every look: all ranks would have to look together.
    """
    writing = [logger for logger in trainer.loggers if not isinstance(logger, DummyLogger)]  # those of fast_dev_run
    first = writing[0] if writing else None
    return Path(getattr(first, "log_dir", None) or getattr(first, "save_dir", None) or trainer.default_root_dir)


class Claim:
    """One process's claim on a run's folder: the kernel gives it up with the process, whichever way that ends.

    The folder itself is locked. A file in it would stay, and a logger would take the folder for one of an earlier run.
    """

    def __init__(self) -> None:
        self._folder: int | None = None

    def take(self, folder: Path) -> None:
        """Claim `folder`, and give up what was claimed before. The folder is made if it is not there.

        Raises:
            ConfigError: Another live run has it; names its process and machine.
        """
        self.give_up()
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(opened)
            raise ConfigError(
                f"The run folder {str(folder)!r} is that of a live run ({holder(folder)}). Leave the logger's version "
                "out, give this run a folder of its own (trainer.logger or trainer.default_root_dir), or end that one."
            ) from None
        except OSError as error:
            os.close(opened)
            log.warning("%s cannot be locked (%s): see to it that no other run writes there.", folder, error.strerror)
        else:
            self._folder = opened

    def give_up(self) -> None:
        """Leave the folder to others; idempotent."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def holder(folder: Path) -> str:
    """Who has locked `folder`, as far as the kernel of this machine tells it."""
    inode = folder.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "FLOCK" in words and any(word.endswith(f":{inode}") for word in words):
            return f"process {words[words.index('FLOCK') + 3]} on {socket.gethostname()}"
    return "a process that this machine does not see"
