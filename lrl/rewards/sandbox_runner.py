"""The first process in the sandbox: runs a program, once for each run that is asked for.

The sandbox's Python runs the text of this file, so it imports nothing of lrl. Two file descriptors
are its arguments. The sheet has the program and its limits, and later the tests. The link asks for
a run with one byte, and gets these lines:

    up              the sandbox works
    begun           the program runs; what happens now is its own doing
    ready           the program has ended, and its tests may come (with tests only)
    NONCE NUMBER    this test has passed
    ended STATUS CPU
"""

import marshal
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

WITH_TESTS = b"t"
WITHOUT_TESTS = b"p"


def main() -> None:
    """Serves runs until the other end of the link is closed."""
    sheet = int(sys.argv[1])
    link = int(sys.argv[2])
    job = _read(sheet)
    _limit(job["limits"])
    os.write(link, b"up\n")
    while kind := os.read(link, 1):
        child = os.fork()
        if child == 0:
            if kind == WITH_TESTS:
                _run_with_tests(job["program"], sheet=sheet, link=link)
            else:
                _run_alone(job["program"], sheet=sheet, link=link)
            return
        os.write(link, b"begun\n")
        _, status, usage = os.wait4(child, 0)
        _end_the_rest()
        code = os.waitstatus_to_exitcode(status)
        os.write(link, f"ended {code} {usage.ru_utime + usage.ru_stime:.3f}\n".encode())


def _read(sheet: int) -> Any:
    return marshal.loads(os.pread(sheet, os.fstat(sheet).st_size, 0))


def _limit(limits: dict[str, int]) -> None:
    for name, limit in limits.items():
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


def _run_alone(program: str, sheet: int, link: int) -> None:
    os.close(sheet)
    os.close(link)
    exec(compile(program, "program.py", "exec", dont_inherit=True), _scope())


def _run_with_tests(program: str, sheet: int, link: int) -> None:
    # Taken before the program runs, which may replace them.
    write, leave, show, raised = os.write, os._exit, sys.excepthook, sys.exc_info
    ask, read, run, build = os.read, _read, exec, compile
    scope = _scope()
    run(build(program, "program.py", "exec", dont_inherit=True), scope)
    write(link, b"ready\n")
    ask(link, 1)
    tests = read(sheet)
    for number, (source, counts) in enumerate(tests["steps"]):
        try:
            run(build(source, "tests.py", "exec", dont_inherit=True), scope)
        except BaseException:
            show(*raised())
            if tests["ends_at_failure"] or not counts:
                break
        else:
            write(link, b"%s %d\n" % (tests["nonce"], number))
    leave(0)


if __name__ == "__main__":
    main()
