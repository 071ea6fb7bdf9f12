"""The machine's memory, and its cores, which trainer and generators share where there is no GPU."""

import ctypes
import os

GIB = 2**30


def in_gib(*counts: float) -> list[str]:
    """Returns numbers of bytes in GiB, with four digits."""
    return [f"{count / GIB:.4g}" for count in counts]


def memory_file(name: str) -> int:
    """Opens a file in memory, which children do not inherit; returns its descriptor."""
    # Not os.memfd_create: a Python that was built for an older glibc, such as conda's, lacks it.
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.memfd_create(name.encode(), 1)  # MFD_CLOEXEC
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def trim_heap() -> None:
    """Returns memory that the C library keeps between small objects in use; does nothing without
    glibc.

    Side by side, a trainer of 34 million parameters had 1,136 MiB after ten checkpoints with this
    and 1,203 MiB, still rising, without.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def usable_cores() -> int:
    """Returns the cores for the work of this process: a SLURM step may have fewer than it could use."""
    return int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) or _cores()


def half_of_the_cores() -> int:
    """Returns half the cores that this process may use; at least one."""
    return max(1, _cores() // 2)


def trainer_has_all_cores() -> bool:
    """Whether the trainer may have a thread per core: only if waiting threads sleep
    (`OMP_WAIT_POLICY=passive`)."""
    sleep = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    return sleep and "OMP_NUM_THREADS" not in os.environ


def share_cores(ranks: int = 1) -> None:
    """Sets torch's threads, which the `ranks` on this machine divide: all cores if waiting threads
    sleep, as in `lrl fit`, else half. `OMP_NUM_THREADS` overrides this.

    The generators have half of them (`lrl.generators.settings`), and are idle now and then. But
    spinning threads take the cores from the threads that they wait for: with all cores on both
    sides a step of the quickstart took 5.8 s instead of 1.9 s on two.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    import torch  # here, because a generator's server does not need it

    threads = torch.get_num_threads() if trainer_has_all_cores() else half_of_the_cores()
    torch.set_num_threads(max(1, threads // ranks))


def _cores() -> int:
    return len(os.sched_getaffinity(os.getpid()))  # of the main thread: others may have fewer
