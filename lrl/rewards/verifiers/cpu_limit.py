"""A limit on the CPU time of a call, which does not depend on how busy the machine is."""

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

_REPEAT_S = 0.5
"""Seconds after which the signal comes again, in case the code has swallowed its exception."""
_Found = TypeVar("_Found")


class OutOfTimeError(BaseException):
    """The CPU time is used up. Not an `Exception`: a library might catch that as one of its own."""


def within(seconds: float, work: Callable[[], _Found]) -> _Found:
    """Runs `work` within `seconds` of this process's CPU time, and returns its result.

    A signal ends the work. Python handles it between two bytecode instructions and inside a
    multiplication of large numbers, but not inside other C code. Python handles no signals outside
    of the main thread, so there is no limit there.

    Raises:
        OutOfTimeError: `work` took longer, also if it swallowed the exception and returned.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    armed, late = True, False

    def ring(*_: object) -> None:
        nonlocal late
        if armed:
            late = True
            raise OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _REPEAT_S)
            found = work()
        finally:
            armed = False
    finally:  # the signal may come just before the line above, and its next one comes much later
        armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        # Never the default, which would end the process if a signal is still pending.
        signal.signal(signal.SIGVTALRM, before if callable(before) else signal.SIG_IGN)
    if late:
        raise OutOfTimeError
    return found
