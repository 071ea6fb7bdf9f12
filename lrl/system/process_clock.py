"""The clock of a deadline for a user's code: it stands still while its process waits for a processor.

On a busy machine code that computes gets a part of a processor, and takes longer by the wall. That
is no fault of what it is called for. So the time counts in which the process computes, or waits for
something else than a processor.
"""

import time
from pathlib import Path

_NANOSECOND = 1e-9


class ProcessClock:
    """Counts the seconds in which the main thread of a process computes or sleeps.

    Of several processes one computes at a time, so they have one clock.

    Only Linux tells how long it waits for a processor; elsewhere that time counts, too.

    Args:
        pids: The process, or those that wait for each other.
        born: `time.monotonic()` at the start of the process, to count from there; None counts from
            now on.
    """

    def __init__(self, *pids: int, born: float | None = None) -> None:
        self._pids = pids
        self._started = time.monotonic() if born is None else born
        self._waited_before_s = self._waited_s() if born is None else 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the start of this clock."""
        waited_s = self._waited_s() - self._waited_before_s
        return time.monotonic() - self._started - max(0.0, waited_s)

    def _waited_s(self) -> float:
        return sum(map(_waited_for_processor_s, self._pids))


def _waited_for_processor_s(pid: int) -> float:
    try:
        _computed, waited, _turns = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # not Linux, or the process has ended
        return 0.0
    return int(waited) * _NANOSECOND
