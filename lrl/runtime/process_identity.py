"""Which process on which machine: what another process needs to know it again, and to see that it has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


def machine() -> str:
    """The same for two processes that see each other's pids, ports and /dev/shm; that of a container is its own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
    return " ".join([boot, *spaces, f"shm:[{os.stat('/dev/shm').st_dev}]"])


def started(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since boot; None if it has ended. A pid alone comes again."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] == "Z" else int(words[19])


@dataclass(frozen=True)
class ProcessIdentity:
    """A process; by default this one."""

    machine: str = field(default_factory=machine)
    pid: int = field(default_factory=os.getpid)
    started: int | None = field(default_factory=lambda: started(os.getpid()))

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        return self.machine == machine()

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended; of another machine's process nobody here knows."""
        return self.here and started(self.pid) != self.started
