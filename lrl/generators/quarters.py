"""The cores of a run's generators beside a trainer with its own: theirs while it computes, all while it waits."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

log = logging.getLogger(__name__)


class Quarters:
    """Keeps a thread of this process, and whole other processes, to some cores.

    Whatever these start inherits where they are at that moment, and moves with them from then on. Linux binds threads
    and not processes, so each thread is bound by itself.

    Args:
        cores: To keep to; none lets everything be where it is.
        thread: Of this process, by the system's own number.
    """

    def __init__(self, cores: Collection[int], thread: int) -> None:
        self.cores, self._everywhere = set(cores), os.sched_getaffinity(os.getpid())
        self._thread = thread
        self._processes: dict[int, list[psutil.Process]] = {}

    def take_in(self, number: int, processes: Iterable[psutil.Process]) -> None:
        """From the next call on generator `number` consists of these processes; those it had are forgotten."""
        self._processes[number] = list(processes)

    def keep(self) -> None:
        """Back to the cores."""
        self._bind(self.cores)

    @contextmanager
    def open(self) -> Iterator[None]:
        """All of this process's cores, for a while. Generators on one of two cores took 1.4 times as long."""
        self._bind(self._everywhere)
        try:
            yield
        finally:
            self.keep()

    def _bind(self, cores: set[int]) -> None:
        if not self.cores:
            return
        try:
            for thread in (self._thread, *self._threads()):
                with suppress(ProcessLookupError):  # it has just ended
                    os.sched_setaffinity(thread, cores)
        except OSError as error:
            log.warning("Generators cannot be kept to the cores %s, and go anywhere: %s", sorted(self.cores), error)
            self.cores = set()

    def _threads(self) -> Iterator[int]:
        for process in (one for some in self._processes.values() for one in some):
            with suppress(FileNotFoundError, ProcessLookupError):
                yield from map(int, os.listdir(f"/proc/{process.pid}/task") if process.is_running() else ())
