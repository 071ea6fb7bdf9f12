"""The agent of docs/agents.md that lrl does not start, beside a run of a test."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

LONGEST_S = 900.0
"""Seconds for a program that does not end with its run."""


def program_of_the_page() -> str:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    found = re.search(r"```python\n(# plays_elsewhere\.py\n.*?)```", page, re.S)
    assert found is not None
    return found[1]


@contextlib.contextmanager
def agent_elsewhere(folder: Path) -> Iterator[list[int]]:
    """Starts the program whenever the run in `folder` serves agents, until the block ends or the
    program fails; it ends with the run. Yields the statuses with which it has ended."""
    program = folder / "plays_elsewhere.py"
    program.write_text(program_of_the_page())
    address = folder / "agents" / "address.json"
    over = Event()
    statuses: list[int] = []

    def play() -> None:
        while not over.wait(0.05):
            if is_served(address):
                command = [sys.executable, str(program), str(address)]
                statuses.append(subprocess.run(command, timeout=LONGEST_S, check=False).returncode)
                if statuses[-1]:
                    return

    thread = Thread(target=play)
    thread.start()
    try:
        yield statuses
    finally:
        over.set()
        thread.join()


def is_served(address: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        where = urlsplit(json.loads(address.read_text())["url"])
        socket.create_connection((where.hostname or "", where.port or 0), 1.0).close()
        return True
    return False
