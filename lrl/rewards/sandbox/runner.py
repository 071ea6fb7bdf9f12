"""The first process in the sandbox: runs the program, once for each run that is asked for, and ends
it at its limits.

The sandbox's Python runs the text of this file behind that of `calls`, so it imports nothing of
lrl. The link, a socket, brings messages of JSON behind their length: the program with its limits,
then for each run whether it has tests, and the tests. The answers are lines of JSON:

    ["begun"]
    ["passed", NUMBER]        of a test
    ["unfit", REASON]         the tests lack something here, whatever the program
    ["ended", STATUS, LIMIT]  LIMIT has ended this run, if it is not empty
    ["over", 0, LIMIT]        a limit of all runs together has ended the last one
    ["busy"]                  so has the time, but the machine is to blame

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

_POLL_S = 0.2
_PR_SET_DUMPABLE = 4
_FOLDERS = ("/tmp", "/dev/shm")
_MOST_FILES = 2**14
"""Files that a program may make: an empty one takes a KiB of the kernel's memory, and no limit of
Linux counts it."""


def main() -> None:
    """Serves runs until the other end of the link is closed."""
    link = socket.socket(fileno=int(sys.argv[1]))
    job = _received(link)
    for name, limit in job["rlimits"].items():
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        spare = name == "RLIMIT_CPU"  # in which a signal says what has happened
        resource.setrlimit(kind, (min(limit, most), min(limit + spare, most)))
    _close_to_others(True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # of the first process: the kernel ignores it
    watch = Watch(job)
    while (has_tests := _received(link)) is not None:
        here, there = socket.socketpair()
        child = os.fork()
        if child == 0:
            link.close()
            here.close()
            _close_to_others(False)
            _run(job["program"], there if has_tests else None)
            return
        tests = os.fork() if has_tests else 0
        if has_tests and tests == 0:
            there.close()
            _test(link, here)
        here.close()
        _answer(link, "begun")
        pids = [child, tests] if has_tests else [child]
        how = watch.end_of(pids, there)
        _answer(link, *how)
        if how[0] != "ended":
            return


def _received(link: socket.socket) -> Any:
    """Returns a message; None at the end."""
    size = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "big")
    return json.loads(link.recv(size, socket.MSG_WAITALL)) if size else None


def _answer(link: socket.socket, *words: Any) -> None:
    link.sendall(json.dumps(words).encode() + b"\n")


def _close_to_others(closed: bool) -> None:
    """Closes the memory and the files of this process to the others of its user, or opens them."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(not closed))


class Watch:
    """The limits of all runs together, and the clock of one run.

    The clock stands still while the main thread of the program or of its tests, which wait for each
    other, waits for a processor.
    """

    def __init__(self, job: Any) -> None:
        self._job = job
        self._is_isolated = os.getpid() == 1
        self._before_s = (0.0, 0.0)

    def end_of(self, pids: list[int], calls: socket.socket) -> tuple[Any, ...]:
        """Waits for the end of a run: of the program, then of its tests if there are any; leaves
        none of its processes; returns the answer."""
        self._pids = pids
        self._began = time.monotonic()
        broken = self._until_ended(pids[0])
        with suppress(OSError):
            calls.shutdown(socket.SHUT_RDWR)  # what the program has started may have it, too
        calls.close()
        broken = broken or self._until_ended(pids[-1]) or self._broken_size()
        self._before_s = self._seconds()
        for pid in [-1] if self._is_isolated else pids:  # there -1 is all but this process
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ends = [os.wait4(pid, 0) for pid in pids]
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        status = next((status for _, status, _ in ends if status), 0)
        return broken or ("ended", os.waitstatus_to_exitcode(status), self._broken_cpu(ends))

    def _until_ended(self, pid: int) -> tuple[Any, ...]:
        end = os.pidfd_open(pid)
        broken: tuple[Any, ...] = ()
        while not broken and not select.select([end], [], [], _POLL_S)[0]:
            broken = self._broken_size() or self._broken_time()
        os.close(end)
        return broken

    def _seconds(self) -> tuple[float, float]:
        """Returns the seconds of all runs by the clock, and by the wall."""
        counted_s, wall_s = self._before_s
        run_s = time.monotonic() - self._began
        return counted_s + run_s - sum(map(waited_s, self._pids)), wall_s + run_s

    def _broken_time(self) -> tuple[Any, ...]:
        timeout_s = self._job["timeout_s"]
        counted_s, wall_s = self._seconds()
        if counted_s <= timeout_s and wall_s <= 2 * timeout_s:
            return ()
        processes = [name for name in os.listdir("/proc") if name.isdigit()]
        # More of them may have taken the processor from each other.
        is_alone = not self._is_isolated or len(processes) <= 1 + len(self._pids)
        is_busy = counted_s <= timeout_s and is_alone
        return ("busy",) if is_busy else ("over", 0, f"the time limit of {timeout_s:g} s")

    def _broken_size(self) -> tuple[Any, ...]:
        most = self._job["max_output_bytes"]
        if os.fstat(1).st_size + os.fstat(2).st_size > most:
            return "over", 0, f"the limit of {most} bytes of output"
        places = map(os.statvfs, _FOLDERS if self._is_isolated else ())
        if sum(place.f_files - place.f_ffree for place in places) > _MOST_FILES:
            return "over", 0, f"the limit of {_MOST_FILES} files"
        return ()

    def _broken_cpu(self, ends: Any) -> str:
        cpu_s = self._job["rlimits"]["RLIMIT_CPU"]
        for _, status, usage in ends:
            used_up = usage.ru_utime + usage.ru_stime >= cpu_s
            if status == signal.SIGXCPU or (status == signal.SIGKILL and used_up):
                return f"the limit of {cpu_s} s of CPU time"
        return ""


def waited_s(pid: int) -> float:
    """Returns the seconds in which the main thread of a process has waited for a processor."""
    with suppress(OSError), open(f"/proc/{pid}/schedstat") as stat:
        return int(stat.read().split()[1]) * 1e-9
    return 0.0


def _scope() -> dict[str, Any]:
    """Returns the names of a new main module, in the place of this one."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    return module.__dict__


def _run(program: str, calls: socket.socket | None) -> None:
    """Runs the program, and answers the calls of its tests if there are any."""
    scope = _scope()
    leave = os._exit
    peer = Peer(calls, known=sys.modules["__main__"]) if calls else None
    exec(compile(program, "program.py", "exec", dont_inherit=True), scope)
    if peer is not None:
        peer.serve()
        leave(0)


def _test(link: socket.socket, calls: socket.socket) -> None:
    """Runs the tests on the program at the other end of `calls`. Does not return."""
    tests = _received(link)
    sys.path[:] = filter(None, sys.path)  # the program may write to the current folder
    scope = _scope()
    peer = Peer(calls, classes=tests["classes"])
    sys.modules.update(dict.fromkeys(tests["modules"], peer.first))
    for number, (source, counts) in enumerate(tests["steps"]):
        try:
            for name in tests["names"]:
                scope.pop(name, None)
                with suppress(AttributeError):
                    scope[name] = getattr(peer.first, name)
            exec(compile(source, "tests.py", "exec", dont_inherit=True), scope)
        except Gone:
            break
        except BaseException as error:
            if isinstance(error, ModuleNotFoundError) and error is not peer.raised:
                _answer(link, "unfit", str(error))
                break
            sys.excepthook(*sys.exc_info())
            if tests["ends_at_failure"] or not counts:
                break
        else:
            _answer(link, "passed", number)
    os._exit(0)


if __name__ == "__main__":
    main()
