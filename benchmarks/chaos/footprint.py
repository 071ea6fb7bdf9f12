"""What a run takes of the machine at one moment, seen from outside."""

from __future__ import annotations

import contextlib
import os
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
"""What `footprint` gives: of the trainer's process, and of it with all below it. Sockets are counted apart from files:
there are more or fewer with the requests at that moment."""


def footprint(trainer: int) -> dict[str, float]:
    """Memory, open files, threads and processes of a run, and what is in shared memory, whoever put it there.

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
                row = process.memory_full_info().pss / 2**20, *descriptors(process.pid), process.num_threads()
        except (psutil.Error, FileNotFoundError):
            continue  # it ended meanwhile
        for name, number in zip(("all_pss_mib", "all_files", "all_sockets", "all_threads"), row, strict=True):
            found[name] += number
        found["processes"] += 1
    usage = os.statvfs(SHM)
    found["shm_mib"] = (usage.f_blocks - usage.f_bfree) * usage.f_frsize / 2**20
    return {name: round(number, 2) for name, number in found.items()}


def descriptors(pid: int) -> tuple[int, int]:
    """How many files and how many sockets a process has open, in one look: two looks would see different requests.

    Raises:
        FileNotFoundError: The process has ended.
    """
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(descriptor))
    sockets = sum(link.startswith("socket:") for link in links)
    return len(links) - sockets, sockets
