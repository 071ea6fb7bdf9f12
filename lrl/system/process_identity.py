"""The identity of a process on its machine: another process can recognise it and see that it has
ended."""

import os
from dataclasses import dataclass, field
from pathlib import Path


def machine() -> str:
    """Returns the same string in processes that share pids, ports and /dev/shm; a container has its
    own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    return " ".join([boot, *spaces, f"shm:[{os.stat('/dev/shm').st_dev}]"])


def started(pid: int) -> int | None:
    """Returns the start time of a process in the kernel's ticks since boot; None if it has
    ended."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] == "Z" else int(words[19])


@dataclass(frozen=True)
class ProcessIdentity:
    """A process; by default this one. The start time makes it unique: the kernel uses a pid
    again."""

    machine: str = field(default_factory=machine)
    pid: int = field(default_factory=os.getpid)
    started: int | None = field(default_factory=lambda: started(os.getpid()))

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        return self.machine == machine()

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended; always False for a process of another machine."""
        return self.here and started(self.pid) != self.started
