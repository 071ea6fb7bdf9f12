"""What Ctrl-C and SIGTERM do to a run: the first one ends it in good order, the second one at once.

Before the first step there is nothing to save, and the handler raises where the trainer stands. From then on it only
leaves a note, and the trainer looks for it where it may stop: in every wait and before every backward pass, never
within an optimizer step. `Stopped` is a SystemExit: Lightning tears the run down, and Python exits with its
status.
"""

from __future__ import annotations

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
    """The exit status that tells a shell of the signal: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signum


class Stopped(SIGTERMException):
    """The run was told to end by the signal `signum`."""

    def __init__(self, signum: int) -> None:
        super().__init__(exit_status(signum))


class Signals:
    """The handlers of SIGINT and SIGTERM during a run.

    A signal that is ignored when the run starts stays ignored: `nohup`, or a shell that runs it in the background,
    wants it so. Python allows handlers on the main thread alone, and in a notebook an interrupt is meant for the cell:
    elsewhere everything is left as it is.
    """

    def __init__(self) -> None:
        self.told: int | None = None
        """The signal that has come."""
        self.raises = False
        """Whether the handler raises: before there is anything to save."""
        self._obeyed = False
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Put the handlers in place."""
        self.told, self.raises, self._obeyed = None, True, False
        if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
            return
        for signum in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                self._before.setdefault(signum, signal.signal(signum, self._take))

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Have the first signal end the process where it stands: for a library's wait, in which no handler runs."""
        self.check()
        for signum in self._before:
            signal.signal(signum, signal.SIG_DFL)
        try:
            yield
        finally:
            for signum in self._before:
                signal.signal(signum, self._take)

    def ignore(self) -> None:
        """Leave the signals to another process, until `put_back`."""
        for signum in self._before:
            signal.signal(signum, signal.SIG_IGN)

    def put_back(self) -> None:
        """Restore the handlers that were there before `listen`; idempotent."""
        self.raises = False
        while self._before:
            signal.signal(*self._before.popitem())

    def check(self) -> None:
        """Raise `Stopped` once if a signal has come: what is saved on the way out may wait, too."""
        if self.told is not None and not self._obeyed:
            self._obeyed = True
            raise Stopped(self.told)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self.told = signum
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)  # the second one needs no Python to end the process
        what = "ends" if self.raises else "saves a checkpoint and ends"
        line = f"\n{signal.Signals(signum).name}: the run {what}. A second signal ends it at once.\n"
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, line.encode())  # print and logging are not safe here: the signal may have come within one
        if self.raises:
            self.check()
