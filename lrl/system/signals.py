"""What ends a run from outside: Ctrl-C, SIGTERM, and the end of a SLURM job's time.

The first signal ends a run gracefully, the second one at once. Before the first step there is
nothing to save, and the handler raises at once. Later it only notes the signal, and the trainer
checks for it in every wait and before every backward pass, never within an optimizer step.
SIGTERMException is a SystemExit: Lightning tears the run down, and Python exits with its status.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

log = logging.getLogger(__name__)


class Signals:
    """The handlers of SIGINT and SIGTERM during a run.

    A signal that is ignored when the run starts stays ignored, for `nohup` and background jobs of a
    shell. Python allows handlers on the main thread alone, and in a notebook an interrupt is meant
    for the cell: elsewhere the handlers stay as they are.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The signal that has come."""
        self.raises = False
        """Whether the handler raises: before there is anything to save."""
        self._requeue: int | None = None
        self._raised = False
        self._before: dict[int, Any] = {}

    @property
    def asks_for_requeue(self) -> bool:
        """Whether the signal has come after which SLURM is to start the job again."""
        return self.received is not None and self.received == self._requeue

    def listen(self, trainer: Any) -> None:
        """Installs the handlers, also of the signal after which SLURM requeues the job."""
        environment = trainer._accelerator_connector.cluster_environment
        in_slurm = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self._requeue = environment.requeue_signal if in_slurm else None
        self.received = None
        self.raises = True
        self._raised = False
        if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
            return
        for signum in (signal.SIGINT, signal.SIGTERM, self._requeue):
            if signum is not None and signal.getsignal(signum) not in (signal.SIG_IGN, None):
                self._before.setdefault(signum, signal.signal(signum, self._handle))

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets a signal end the process: in a library's wait no handler runs."""
        self.check()
        self._set(signal.SIG_DFL)
        try:
            yield
        finally:
            self._set(self._handle)

    def ignore(self) -> None:
        """Ignores the signals until `put_back`, for another process to handle."""
        self._set(signal.SIG_IGN)

    def put_back(self) -> None:
        """Restores the handlers from before `listen`; idempotent."""
        while self._before:
            signal.signal(*self._before.popitem())

    def check(self) -> None:
        """Raises SIGTERMException if a signal has come; only once: saving may call it again."""
        if self.received is not None and not self._raised:
            self._raised = True
            raise SIGTERMException(128 + self.received)

    def _set(self, handler: Any) -> None:
        for signum in self._before:
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        self._set(signal.SIG_DFL)  # the second one needs no Python to end the process
        ending = "ends" if self.raises else "saves a checkpoint and ends"
        line = (
            f"\n{signal.Signals(signum).name}: the run {ending}. A second signal ends it at once.\n"
        )
        with contextlib.suppress(OSError):  # the terminal may be gone
            # Print and logging are not safe here: the signal may have come within one.
            os.write(2, line.encode())
        if self.raises:
            self.check()


def slurm_job() -> str:
    """Returns the SLURM job's id, which it keeps when it is requeued; empty outside of SLURM."""
    if task := os.environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    return os.environ.get("SLURM_JOB_ID", "")


def run_of_job() -> str:
    """Returns what the starts of one command in one job have in common, and no other run has."""
    return f"{slurm_job()}-{zlib.crc32(repr(sys.argv).encode()):08x}"


def requeue() -> None:
    """Has SLURM start this job again; logs why it does not."""
    words = ["scontrol", "requeue", slurm_job()]
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=60.0)
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "stderr", None) or error
        log.error("SLURM does not requeue job %s: %s", slurm_job(), str(why).strip())
