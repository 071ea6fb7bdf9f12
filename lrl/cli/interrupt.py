"""Ctrl-C in a command that is no run: there is nothing to save, and a traceback would say nothing."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Sequence

Main = Callable[[Sequence[str] | None], int]


def ends_quietly(main: Main) -> Main:
    """A command that at Ctrl-C ends its line and gives the exit status that tells a shell of the signal (130)."""

    @functools.wraps(main)
    def call(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            return 128 + signal.SIGINT

    return call
