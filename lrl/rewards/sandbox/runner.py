"""The first process in the sandbox: runs the program as often as asked, and ends it at its limits.
The sandbox's Python runs the text of this file behind that of `calls`, without lrl.

It gets three files: a link, and in JSON the program with its limits, and the tests. Each byte on
the link asks for a run. The answers are lines of JSON:

    ["passed", NUMBER]         of a test
    ["unfit", REASON]          the tests lack something here, whatever the program
    ["ended", STATUS, LIMIT]   this run; by a limit of all runs together if it is not empty

Tests run in a process beside the program's. It alone reads them, and calls the program.
"""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrl.rewards.sandbox.calls import Gone, Peer

MODULES = ("solution", "program", "main", "submission")  # as which tests may import the program
_POLL_S = 0.2
_PR_SET_DUMPABLE = 4
_MOST_FILES = 2**14  # no limit of Linux counts the KiB that an empty one takes


def main() -> None:
    link_file, job_file, tests_file = map(int, sys.argv[1:])
    link = socket.socket(fileno=link_file)
    job = _read(job_file)
    for name, limits in job["rlimits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_DUMPABLE, 0)  # closes its memory and files to the others of its user
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of the first process: the kernel ignores it
    watch = Watch(job)
    while link.recv(1):
        here, there = socket.socketpair()
        pids = [os.fork()]
        if pids[0] == 0:
            link.close()
            here.close()
            os.close(tests_file)
            prctl(_PR_SET_DUMPABLE, 1)
            _run(job["program"], there if job["has_tests"] else None)
            return
        if job["has_tests"]:
            pids.append(os.fork())
            if pids[1] == 0:
                there.close()
                _test(_read(tests_file), link, here)
        here.close()
        _answer(link, "ended", *watch.end_of(pids, there))


def _read(file: int) -> Any:
    with open(file) as stream:
        return json.load(stream)


def _answer(link: socket.socket, *words: Any) -> None:
    link.sendall(json.dumps(words).encode() + b"\n")


class Watch:
    """The limits of all runs together."""

    def __init__(self, job: Any) -> None:
        self._timeout_s = job["timeout_s"]
        self._max_output_bytes = job["max_output_bytes"]
        self._is_isolated = os.getpid() == 1
        self._before_s = 0.0

    def end_of(self, pids: list[int], calls: socket.socket) -> tuple[int, str]:
        """Waits for the end of the program, then of its tests if there are any; leaves none of its
        processes; returns its status, and the limit that it broke or ""."""
        self._pids = pids
        self._began = time.monotonic()
        over = ""
        for pid in pids:
            over = over or self._until_ended(pid)
            with suppress(OSError):
                calls.shutdown(socket.SHUT_RDWR)  # what the program has started may have it, too
        self._before_s = self._seconds()
        for pid in [-1] if self._is_isolated else pids:  # there -1 is all but this process
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        calls.close()
        return next(filter(None, ends), 0), over

    def _until_ended(self, pid: int) -> str:
        end = os.pidfd_open(pid)
        ended = False
        over = ""
        while not (ended or over):
            ended = bool(select.select([end], [], [], _POLL_S)[0])
            over = self._too_large()
            if not ended and self._seconds() > self._timeout_s:
                over = f"the time limit of {self._timeout_s:g} s"
        os.close(end)
        return over

    def _too_large(self) -> str:
        if os.fstat(1).st_size + os.fstat(2).st_size > self._max_output_bytes:
            return f"the limit of {self._max_output_bytes} bytes of output"
        places = map(os.statvfs, ("/tmp", "/dev/shm") if self._is_isolated else ())
        if sum(place.f_files - place.f_ffree for place in places) > _MOST_FILES:
            return f"the limit of {_MOST_FILES} files"
        return ""

    def _seconds(self) -> float:
        """Returns the seconds of all runs, without those in which the main thread of the program or
        of its tests waits for a processor. More processes may take it from each other."""
        run_s = time.monotonic() - self._began
        counted_s = run_s - sum(map(waited_s, self._pids))
        if self._is_isolated and sum(map(str.isdigit, os.listdir("/proc"))) > 1 + len(self._pids):
            counted_s = max(counted_s, run_s / 2)
        return self._before_s + counted_s


def waited_s(pid: int) -> float:
    with suppress(OSError), open(f"/proc/{pid}/schedstat") as stat:
        return int(stat.read().split()[1]) * 1e-9
    return 0.0


def _scope() -> dict[str, Any]:
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    return module.__dict__


def _run(program: str, calls: socket.socket | None) -> None:
    scope = _scope()
    leave = os._exit
    peer = Peer(calls, known=sys.modules["__main__"]) if calls else None
    exec(compile(program, "program.py", "exec", dont_inherit=True), scope)
    if peer is not None:
        with suppress(Gone):
            peer.serve()
        leave(0)


def _test(tests: Any, link: socket.socket, calls: socket.socket) -> None:
    """Runs the tests on the program at the other end of `calls`; does not return."""
    sys.path[:] = filter(None, sys.path)  # the program may write to the current folder
    scope = _scope()
    peer = Peer(calls, classes=[name for name in tests["names"] if name[:1].isupper()])
    sys.modules.update(dict.fromkeys(MODULES, peer.first))  # type: ignore[arg-type]
    for number, (source, is_test) in enumerate(tests["steps"]):
        try:
            for name in tests["names"]:
                scope.pop(name, None)
                with suppress(AttributeError):
                    scope[name] = getattr(peer.first, name)
            exec(compile(source, "tests.py", "exec", dont_inherit=True), scope)
            _answer(link, "passed", number)
        except Gone:
            break
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and error is not peer.raised:
                _answer(link, "unfit", str(error))
                break
            sys.excepthook(*sys.exc_info())
            if tests["ends_at_failure"] or not is_test:
                break
    os._exit(0)


if __name__ == "__main__":
    main()
