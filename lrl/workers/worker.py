"""What runs in a worker's process: it loads the user's code and answers calls, in lines of JSON
over a socket. The code may hang, crash or leak; here are its limits, and the words for failures.

    {"job": 7, "begin": BASE64}    score a group, or begin an episode; pickled prompt and columns
    {"job": 7, "turn": {...}}      take a turn of the policy
    {"job": 7, "end": true}        end the episode

An answer is `{"job": 7, "answer": ...}`, or `{"job": 7, "failed": [KIND, MESSAGE]}`. A worker's
first line is `{"ready": true}`, or `{"refused": WHY}` if the code cannot be loaded.

It ends by itself what awaits something for too long. While plain code runs it cannot, so it notes
in `RunningCode` whose code that is, and the other end kills it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import pickletools
import resource
import signal
import socket
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lrl.errors import ConfigError
from lrl.system.endpoint import LOOPBACK
from lrl.system.processes import die_with, fork

OUT_OF_MEMORY = 112  # exit code of a process at its memory limit
LONGEST_MESSAGE = 500
START_TIMEOUT_S = 120.0  # for the start of such a process, by default
GUARD = 'What starts the training must stand under `if __name__ == "__main__":`.'
LONGEST_LINE = 2**26  # bytes of an answer
NOBODY = -1  # in the place of an item: any, or none, of the job's code runs
_NOT_THE_USERS = (  # files of lrl and of libraries
    *(str(Path(__file__).parents[1]) + os.sep, "<frozen "),
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
)


class RunningCode(ctypes.Structure):
    """Whose code runs, in memory that both ends share; only the worker writes."""

    _fields_ = [
        ("pid", ctypes.c_int64),
        ("job", ctypes.c_int64),  # 0: nobody's code runs
        ("stretch", ctypes.c_int64),  # counts the beginnings of what has a deadline
        ("item", ctypes.c_int32),  # a response of the group; 0 in an episode
    ]

    def begin(self, job: int) -> None:
        self.job = 0
        self.item = NOBODY
        self.stretch += 1
        self.job = job


def main(
    connection: socket.socket, code: Any, memory_gib: float | None, owner: int, running: RunningCode
) -> None:
    """Has `serve` of the pickled `code` answer calls of the process `owner` until the connection
    ends; the parent then ends what the code has started."""
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
        loaded = pickle.loads(code.raw)
    except Exception as error:
        connection.sendall(line({"refused": message_of(error) + where_raised(error)}))
        return
    limit_memory(memory_gib)
    connection.sendall(line({"ready": True}))
    loaded.serve(connection, running)
    os._exit(0)  # whatever the code still does


def line(message: dict[str, Any]) -> bytes:
    """Raises TypeError or ValueError for a message that the other end could not read."""
    found = json.dumps(message).encode() + b"\n"
    if len(found) > LONGEST_LINE:
        raise ValueError(f"the reply has {len(found):,} bytes; at most {LONGEST_LINE:,} are sent")
    return found


def calls(connection: socket.socket) -> Iterator[dict[str, Any]]:
    with connection.makefile("rb") as lines:
        for each in lines:
            yield json.loads(each)


# ---- limits


def process_clock(pid: int) -> Callable[[], float]:
    """Returns a clock of the seconds, from now on, in which the main thread of a process computes
    or sleeps, without its waits for a processor: a busy machine is not the code's fault."""
    began, waited_s = time.monotonic(), _waited_for_processor_s(pid)
    return lambda: time.monotonic() - began - max(0.0, _waited_for_processor_s(pid) - waited_s)


def _waited_for_processor_s(pid: int) -> float:
    try:
        _computed, waited, _turns = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # not Linux, or the process has ended
        return 0.0
    return int(waited) * 1e-9


def ask_this_machine_itself() -> None:
    """Has HTTP clients, also of child processes, reach loopback without the environment's proxy: an
    agent finds its policy there."""
    named = {name: os.environ.get(name, "") for name in ("no_proxy", "NO_PROXY")}
    for name, hosts in named.items():
        hosts = hosts or "".join(named.values())
        if hosts != "*":
            hosts = f"{hosts},{LOOPBACK}".lstrip(",")
        os.environ[name] = hosts


def limit_memory(gib: float | None) -> None:
    """Limits writable private memory (RLIMIT_DATA) beyond what is in use now. RLIMIT_AS would count
    the many GiB that CUDA, Java and malloc's arenas only reserve."""
    if gib is None:
        return
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


# ---- failures


def message_of(error: BaseException) -> str:
    """Returns an exception's type and message; its `__str__` may raise."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be read: {type(another).__name__})"
    return f"{type(error).__name__}: {message}"[:LONGEST_MESSAGE]


def where_raised(error: BaseException) -> str:
    """Returns the last line of the user's code in the traceback, in brackets, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f" ({user_frames[-1].filename}, line {user_frames[-1].lineno})" if user_frames else ""


def pickled(thing: Any, what: str) -> bytes:
    """Raises ConfigError, which begins with `what`, for an object that cannot be sent to a
    worker."""
    try:
        return pickle.dumps(thing)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "__mp_main__" in str(error):  # the script's name in a worker, which only imports it
            raise ConfigError(
                f"A worker imports this script, and it begins to train. {GUARD}"
            ) from None
        raise ConfigError(
            f"{what}, which cannot be sent to a worker: {error}. Define it at the top level of a "
            "module (no lambda, no function in a function), without open files or connections."
        ) from error


def names_main(pickled: bytes) -> bool:
    """Whether something in it is defined in the script that runs."""
    return any(text == "__main__" for _, text, _ in pickletools.genops(pickled))
