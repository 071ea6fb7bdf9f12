"""The division of CPU cores between trainer and generators on a machine without a GPU."""

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

log = logging.getLogger(__name__)


def usable_cores() -> int:
    """Returns the cores for the work of this process: a SLURM step may have fewer than it could use."""
    return int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or len(_cores())


def half_of_the_cores() -> int:
    """Returns half the cores that this process may use; at least one."""
    return max(1, len(_cores()) // 2)


def trainer_has_all_cores() -> bool:
    """Whether the trainer may have a thread per core: only if waiting threads sleep
    (`OMP_WAIT_POLICY=passive`)."""
    sleep = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    return sleep and "OMP_NUM_THREADS" not in os.environ


def cores_of_generators(threads: Sequence[int | None]) -> list[int]:
    """Returns the cores to pin generators, and the thread that reads their streams, to; empty for
    no pinning.

    Next to a trainer with half of the cores they are the other half, if the generators' threads fit
    there. A trainer with one of two cores was preempted 1,400 times a step while generators were
    not pinned, and 150 times when they were; a step took 0.95 times as long. `threads` are those of
    each generator, None for half of the cores.
    """
    # The trainer's threads are not pinned: the processes that they start would inherit it.
    others = _cores()[half_of_the_cores() :]
    chosen = "OMP_NUM_THREADS" in os.environ  # the user's own choice for both sides
    fit = sum(number or half_of_the_cores() for number in threads) <= len(others)
    return others if fit and not chosen and not trainer_has_all_cores() else []


def share_cores(ranks: int = 1) -> None:
    """Sets torch's threads, which the `ranks` on this machine divide: all cores if waiting threads
    sleep, as in `lrl fit`, else half. `OMP_NUM_THREADS` overrides this.

    The generators have half of them (`lrl.generators.cpu_backend`), and are idle now and then. But
    spinning threads take the cores from the threads that they wait for: with all cores on both
    sides a step of the quickstart took 5.8 s instead of 1.9 s on two.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    import torch  # here, because a generator's server does not need it

    threads = torch.get_num_threads() if trainer_has_all_cores() else half_of_the_cores()
    torch.set_num_threads(max(1, threads // ranks))


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(os.getpid()))  # of the main thread: others may have fewer


class CpuPinning:
    """Pins generators, and one `thread` of this process (native id), to `cores` while the trainer
    computes, and unpins them while it waits. Without cores it does nothing."""

    def __init__(self, cores: Collection[int], thread: int) -> None:
        self.cores = set(cores)
        self._all_cores = os.sched_getaffinity(os.getpid())
        self._thread = thread
        self._processes: dict[int, list[psutil.Process]] = {}

    def set_processes(self, number: int, processes: Iterable[psutil.Process]) -> None:
        """Replaces the processes of generator `number`, from the next pinning on."""
        self._processes[number] = list(processes)

    def pin(self) -> None:
        """Pins all threads."""
        self._bind(self.cores)

    @contextmanager
    def unpinned(self) -> Iterator[None]:
        """Lets all threads use all cores within the block. Generators on one of two cores took 1.4
        times as long."""
        self._bind(self._all_cores)
        try:
            yield
        finally:
            self.pin()

    def _bind(self, cores: set[int]) -> None:
        if not self.cores:
            return
        try:
            for thread in (self._thread, *self._threads()):
                with suppress(ProcessLookupError):  # it has just ended
                    os.sched_setaffinity(thread, cores)
        except OSError as error:
            text = "Generators cannot be pinned to the cores %s and use all cores: %s"
            log.warning(text, sorted(self.cores), error)
            self.cores = set()

    def _threads(self) -> Iterator[int]:
        # Linux binds threads, not processes. A thread or process started later inherits the binding
        # of its parent.
        for process in (one for processes in self._processes.values() for one in processes):
            with suppress(FileNotFoundError, ProcessLookupError):
                if process.is_running():
                    yield from map(int, os.listdir(f"/proc/{process.pid}/task"))
