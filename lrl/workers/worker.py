"""What runs in a worker's process: it loads the user's code and answers calls, in lines of JSON
over a socket.

    {"job": 7, "begin": BASE64}    score a group, or begin an episode; pickled prompt and columns
    {"job": 7, "turn": {...}}      take a turn of the policy
    {"job": 7, "end": WHY}         end the episode

An answer is `{"job": 7, "answer": ...}`, or `{"job": 7, "failed": [KIND, MESSAGE]}`. The first line
of a worker is `{"ready": true}`, or `{"refused": WHY}` if the code cannot be loaded.

The worker itself ends what awaits something for too long. It cannot do that while plain code runs,
so it notes in `RunningCode` whose code that is, and the other end kills it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lrl.system.processes import die_with, fork
from lrl.workers.user_code import ask_this_machine_itself, limit_memory, message_of, where_raised

LONGEST_LINE = 2**26
"""Bytes of an answer."""
_NANOSECOND = 1e-9
NOBODY = -1
"""In the place of an item: any, or none, of the job's code runs."""


class RunningCode(ctypes.Structure):
    """Whose code runs, in memory that both ends share; only the worker writes."""

    _fields_ = [
        ("pid", ctypes.c_int64),
        ("job", ctypes.c_int64),  # 0: nobody's code runs
        ("stretch", ctypes.c_int64),  # counts the beginnings of what has a deadline
        ("item", ctypes.c_int32),  # a response of the group; 0 in an episode
        ("part", ctypes.c_int32),  # a reward
    ]

    def begin(self, job: int) -> None:
        """Notes that a job's code may run from now on."""
        self.job = 0
        self.item = NOBODY
        self.stretch += 1
        self.job = job


class UserCode(ABC):
    """A user's code, as it is sent to a worker."""

    @abstractmethod
    def serve(self, connection: socket.socket, running: RunningCode) -> None:
        """Answers calls until the connection ends."""


def main(
    connection: socket.socket,
    code: bytes,
    memory_gib: float | None,
    owner: int,
    running: RunningCode,
) -> None:
    """Runs pickled `UserCode` for the process `owner` until the connection ends; this process's
    parent then ends what the code has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the owner decides
    die_with(owner, signal.SIGTERM)
    parent = os.getpid()
    fork()
    die_with(parent)
    ask_this_machine_itself()
    # A handler in Python would wait for Python's lock.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    running.pid = os.getpid()
    try:
        loaded: UserCode = pickle.loads(code)
    except Exception as error:
        connection.sendall(line({"refused": message_of(error) + where_raised(error)}))
        connection.recv(1)  # until the owner ends it
        return
    limit_memory(memory_gib)
    connection.sendall(line({"ready": True}))
    loaded.serve(connection, running)
    os._exit(0)  # whatever the code still does


def line(message: dict[str, Any]) -> bytes:
    """Returns the line of a message; raises TypeError or ValueError for one that the other end
    could not read."""
    found = json.dumps(message).encode() + b"\n"
    if len(found) > LONGEST_LINE:
        raise ValueError(f"the reply has {len(found):,} bytes; at most {LONGEST_LINE:,} are sent")
    return found


def calls(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yields the calls until the connection ends."""
    with connection.makefile("rb") as lines:
        for each in lines:
            yield json.loads(each)


class ProcessClock:
    """The clock of a deadline: the seconds, from now on, in which the main thread of a process
    computes or sleeps, without its waits for a processor: a busy machine is no fault of the code.
    Only Linux tells; elsewhere those waits count.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._started = time.monotonic()
        self._waited_before_s = _waited_for_processor_s(pid)

    @property
    def seconds(self) -> float:
        waited_s = _waited_for_processor_s(self._pid) - self._waited_before_s
        return time.monotonic() - self._started - max(0.0, waited_s)

    def is_beyond(self, seconds: float) -> bool:
        """Whether more seconds have gone by; asks Linux only if they have by the wall."""
        return time.monotonic() - self._started > seconds and self.seconds > seconds


def _waited_for_processor_s(pid: int) -> float:
    try:
        _computed, waited, _turns = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # not Linux, or the process has ended
        return 0.0
    return int(waited) * _NANOSECOND
