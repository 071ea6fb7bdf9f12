"""The first process in the sandbox: runs a program, once for each run that is asked for.

The sandbox's Python runs the text of this file, so it imports nothing of lrl. Two file descriptors
are its arguments. The sheet has the program and its limits, and later the tests. The link asks for
a run with one byte, and gets these lines:

    up              the sandbox works
    begun           the program runs; what happens now is its own doing
    passed NUMBER   this test has passed
    unfit REASON    the tests lack something here, whatever the program
    ended STATUS CPU

Tests run in a process beside the program's. Theirs alone has the sheet and the link, and calls the
program (`sandbox_calls.py`, whose text stands before this one).
"""

import ctypes
import marshal
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrl.rewards.sandbox_calls import Gone, Peer

WITH_TESTS = b"t"
WITHOUT_TESTS = b"p"
_PR_SET_DUMPABLE = 4


def main() -> None:
    """Serves runs until the other end of the link is closed."""
    sheet = int(sys.argv[1])
    link = int(sys.argv[2])
    job = _read(sheet)
    _limit(job["limits"], processes=1)
    _close_to_others(True)
    os.write(link, b"up\n")
    while kind := os.read(link, 1):
        here, there = socket.socketpair() if kind == WITH_TESTS else (None, None)
        child = os.fork()
        if child == 0:
            os.close(sheet)
            os.close(link)
            _limit(job["limits"], processes=here is not None)
            _close_to_others(False)
            _run(job["program"], here, there)
            return
        tests = 0
        if here is not None and there is not None:
            tests = os.fork()
            if tests == 0:
                _test(sheet, link, here)
            here.close()
        os.write(link, b"begun\n")
        _, status, usage = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if there is not None:
            with suppress(OSError):
                there.shutdown(socket.SHUT_RDWR)  # what the program has started may have it, too
            there.close()
            status = os.waitpid(tests, 0)[1]
            code = code or os.waitstatus_to_exitcode(status)
        _end_the_rest()
        os.write(link, f"ended {code} {usage.ru_utime + usage.ru_stime:.3f}\n".encode())


def _read(sheet: int) -> Any:
    return marshal.loads(os.pread(sheet, os.fstat(sheet).st_size, 0))


def _close_to_others(closed: bool) -> None:
    """Closes the memory and the files of this process to the others of its user, or opens them."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(not closed))


def _limit(limits: dict[str, int], processes: int) -> None:
    """Limits this process, with so many `processes` beside the program and the runner."""
    for name, limit in limits.items():
        limit += processes * (name == "RLIMIT_NPROC")
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        # One second more, in which a signal says what has happened.
        last = limit + 1 if name == "RLIMIT_CPU" else limit
        resource.setrlimit(kind, (limit, last))


def _end_the_rest() -> None:
    """Ends what the program has left running. Outside of a sandbox -1 would be all processes of
    the user."""
    if os.getpid() != 1:
        return
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _scope() -> dict[str, Any]:
    """Returns the names of a new main module, in the place of this one."""
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    return module.__dict__


def _run(program: str, here: socket.socket | None, there: socket.socket | None) -> None:
    """Runs the program, and answers the calls of its tests if there are any."""
    scope = _scope()
    if here is None or there is None:
        exec(compile(program, "program.py", "exec", dont_inherit=True), scope)
        return
    here.close()
    leave = os._exit
    peer = Peer(there, known=sys.modules["__main__"])
    exec(compile(program, "program.py", "exec", dont_inherit=True), scope)
    peer.serve()
    leave(0)


def _test(sheet: int, link: int, calls: socket.socket) -> None:
    """Runs the tests on the program at the other end of `calls`. Does not return."""
    tests = _read(sheet)
    sys.path[:] = filter(None, sys.path)  # the program may write to the current folder
    scope = _scope()
    peer = Peer(calls, classes=tests["classes"], is_guarded=True)
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
                os.write(link, f"unfit {error}\n".encode())
                break
            sys.excepthook(*sys.exc_info())
            if tests["ends_at_failure"] or not counts:
                break
        else:
            os.write(link, b"passed %d\n" % number)
    os._exit(0)


if __name__ == "__main__":
    main()
