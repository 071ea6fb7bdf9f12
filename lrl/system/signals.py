"""Handlers of Ctrl-C and SIGTERM: the first one ends a run gracefully, the second one at once.

Before the first step there is nothing to save, and the handler raises at once. Later it only notes
the signal, and the trainer checks for it in every wait and before every backward pass, never within
an optimizer step. SIGTERMException is a SystemExit: Lightning tears the run down, and Python exits
with its status.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException


def exit_status(signum: int) -> int:
    """Returns the exit status of a shell for the signal: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signum


class Signals:
    """The handlers of SIGINT and SIGTERM during a run.

    A signal that is ignored when the run starts stays ignored, for `nohup` and background jobs of a
    shell. Python allows handlers on the main thread alone, and in a notebook an interrupt is meant
    for the cell: elsewhere the handlers stay as they are.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The signal that has come."""
        self.requeue_signal: int | None = None
        self.raises = False
        """Whether the handler raises: before there is anything to save."""
        self._raised = False
        self._before: dict[int, Any] = {}

    def listen(self, requeue_signal: int | None = None) -> None:
        """Installs the handlers, also of the signal after which SLURM requeues the job."""
        self.requeue_signal = requeue_signal
        self.received = None
        self.raises = True
        self._raised = False
        if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
            return
        for signum in (signal.SIGINT, signal.SIGTERM, requeue_signal):
            if signum is not None and signal.getsignal(signum) not in (signal.SIG_IGN, None):
                self._before.setdefault(signum, signal.signal(signum, self._handle))

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets the first signal end the process at once: for a library's wait, in which no handler
        runs."""
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
        self.raises = False
        while self._before:
            signal.signal(*self._before.popitem())

    def check(self) -> None:
        """Raises SIGTERMException if a signal has come; only once, since saving on the way out may
        call it again."""
        if self.received is not None and not self._raised:
            self._raised = True
            raise SIGTERMException(exit_status(self.received))

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
