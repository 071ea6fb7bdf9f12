"""A victim's journal: one JSON line for each thing that happened, readable whenever the victim is killed.

A line is one write of the kernel's, so it is there whole as soon as the write returns, whatever then becomes of the
process. Times are seconds since 1970, for writer and reader are two processes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """The writing end, one for each launch of a victim.

    Args:
        path: The file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.launch = sum(line["event"] == "launch" for line in Reader(path).refresh())
        """How many launches came before this one."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, event: str, **fields: Any) -> None:
        """Add a line; from any thread."""
        line = {"event": event, "launch": self.launch, "time": round(time.time(), 3), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Reader:
    """The reading end.

    Args:
        path: The file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        """All whole lines so far, in order."""
        self._offset = 0

    def refresh(self) -> list[Line]:
        """Read what has been added, and return all lines."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self.lines += [json.loads(line) for line in whole.splitlines()]
        return self.lines

    def of(self, event: str) -> list[Line]:
        """The lines of one kind."""
        return [line for line in self.lines if line["event"] == event]
