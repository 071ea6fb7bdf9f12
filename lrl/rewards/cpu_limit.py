"""Ends a computation in other people's Python code after so much computing, and lives on.

What counts is the time that this process computes, not the time that goes by: so what is found does not depend on how
busy the machine is. A signal does it, which Python looks at between two steps of its own, and between the rows of a
multiplication of large numbers. A step inside other C code is not interrupted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")
_AGAIN_S = 0.5
"""After which the signal comes again, should the code have swallowed its exception."""


class OutOfTimeError(BaseException):
    """The computing is over its limit. Not an `Exception`, which the code that it ends might take for its own."""


def within(seconds: float, work: Callable[[], _Found]) -> _Found:
    """What `work` returns. Outside of the main thread, where Python runs no signal handlers, there is no limit.

    Args:
        seconds: Of computing.
        work: May be left at any place, with its `finally` clauses run.

    Raises:
        OutOfTimeError: If it took longer, even if it went on in spite of the signal and returned.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return work()
    armed, rung = True, False

    def ring(*_: object) -> None:
        nonlocal rung
        if armed:
            rung = True
            raise OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
            found = work()
        finally:
            armed = False
    finally:  # the signal may come just before the line above, and its next one comes much later
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # Never the default, which would end the process for a signal that is still on its way.
        signal.signal(signal.SIGVTALRM, before if callable(before) else signal.SIG_IGN)
    if rung:
        raise OutOfTimeError
    return found
