"""The division of CPU cores between trainer and generators on a machine without a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil


def half_of_the_cores() -> int:
    """Threads of a side that has half of the cores this process may use; at least one."""
    return max(1, len(_cores()) // 2)


def trainer_has_all_cores() -> bool:
    """Whether its threads may be as many as there are cores: those that wait sleep (`OMP_WAIT_POLICY=passive`)."""
    return "OMP_NUM_THREADS" not in os.environ and os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"


def cores_of_generators(threads: Sequence[int | None]) -> list[int]:
    """The cores that generators keep to while the trainer computes, and the thread that reads their streams; or none.

    Beside a trainer with half of the cores they are the other half, if the generators' threads fit there. The trainer's
    threads are not bound to anything: what they start would inherit it. A trainer with one of two cores was put off
    1,400 times a step while generators went where they liked, and 150 times when they kept to the other one; a step
    took 0.95 times as long.

    Args:
        threads: Of each generator; None for half of the cores.
    """
    others = _cores()[half_of_the_cores() :]
    chosen = "OMP_NUM_THREADS" in os.environ  # both sides' threads are the user's own choice
    fit = sum(number or half_of_the_cores() for number in threads) <= len(others)
    return others if fit and not chosen and not trainer_has_all_cores() else []


def share_cores(ranks: int = 1) -> None:
    """Train with all cores if threads that wait sleep (`OMP_WAIT_POLICY=passive`, as `lrl fit` has it), else with half.

    The generators have half of them (`lrl.generators.cpu_backend`), and are idle now and then. But where waiting
    threads spin, they take the cores from those that they wait for: with all cores on both sides a step of the
    quickstart took 5.8 s instead of 1.9 s on two. `OMP_NUM_THREADS` overrules this.

    Args:
        ranks: Trainer processes on this machine, which divide those cores.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    import torch  # here, because a generator's server does without it

    threads = torch.get_num_threads() if trainer_has_all_cores() else half_of_the_cores()
    torch.set_num_threads(max(1, threads // ranks))


def _cores() -> list[int]:
    """Of the main thread: others may have fewer."""
    return sorted(os.sched_getaffinity(os.getpid()))


log = logging.getLogger(__name__)


class CpuPinning:
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

    def set_processes(self, number: int, processes: Iterable[psutil.Process]) -> None:
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
