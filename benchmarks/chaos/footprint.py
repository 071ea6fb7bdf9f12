"""The resources of a run at one moment: from outside (`footprint`), and the heap of a process from
inside (`held`)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
NAMES = (
    "trainer_rss_mib",
    "all_pss_mib",
    "trainer_files",
    "trainer_sockets",
    "all_files",
    "all_sockets",
    "trainer_threads",
    "all_threads",
    "processes",
    "shm_mib",
)
"""Keys of `footprint`: of the trainer's process, and of it with all its descendants. Sockets are
counted apart from files: their number follows the requests at that moment."""
HELD_NAMES = ("trainer_heap_mib", "trainer_python_blocks")
"""Keys of `held`."""


def footprint(trainer: int) -> dict[str, float]:
    """Measures memory, open files, threads and processes of a run, and all use of shared memory by
    any process.

    Memory of all processes counts a shared page once.

    Raises:
        psutil.NoSuchProcess, FileNotFoundError: The trainer has ended.
    """
    root = psutil.Process(trainer)
    found = dict.fromkeys(NAMES, 0.0)
    found["trainer_rss_mib"] = root.memory_info().rss / 2**20
    found["trainer_files"], found["trainer_sockets"] = descriptors(trainer)
    found["trainer_threads"] = root.num_threads()
    for process in [root, *root.children(recursive=True)]:
        try:
            with process.oneshot():
                row = (
                    process.memory_full_info().pss / 2**20,
                    *descriptors(process.pid),
                    process.num_threads(),
                )
        except (psutil.Error, FileNotFoundError):
            continue  # it ended meanwhile
        for name, number in zip(
            ("all_pss_mib", "all_files", "all_sockets", "all_threads"), row, strict=True
        ):
            found[name] += number
        found["processes"] += 1
    usage = os.statvfs(SHM)
    found["shm_mib"] = (usage.f_blocks - usage.f_bfree) * usage.f_frsize / 2**20
    return {name: round(number, 2) for name, number in found.items()}


def descriptors(pid: int) -> tuple[int, int]:
    """Counts the open files and the open sockets of a process, in one look: two looks would see
    different requests.

    Raises:
        FileNotFoundError: The process has ended.
    """
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(descriptor))
    sockets = sum(link.startswith("socket:") for link in links)
    return len(links) - sockets, sockets


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2 (malloc.h, from 2.33 on): all in bytes but the numbers of blocks."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "free",
            "keep",
        )
    ]


def held() -> dict[str, float]:
    """Measures this process: MiB that malloc has given out, mapped ones included, and blocks that
    Python has given out.

    Resident memory is more, and follows it only roughly: the C library keeps freed memory for
    later.
    """
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    heap = (found.uordblks + found.hblkhd) / 2**20
    return dict(zip(HELD_NAMES, (round(heap, 2), float(sys.getallocatedblocks())), strict=True))
