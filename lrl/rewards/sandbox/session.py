"""A sandbox, seen from outside: starts it, and asks for runs of its program.

A program there has its own processes, network (without a way out), `/proc` and a small `/tmp`, and
of this machine's files those that Python needs, which it cannot change. It is told nothing of the
trainer, and neither is bwrap. `isolation: none` is a process of this user with the same limits.

The runner inside says how a run ended, and that is the program's doing. Whatever else ends the
sandbox is the machine's fault, and an error.
"""

import fcntl
import functools
import inspect
import json
import os
import platform
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Literal, NamedTuple, Self

from lrl.rewards.sandbox import calls, runner
from lrl.rewards.sandbox.bubblewrap import bwrap_command, interpreter, seccomp_filter
from lrl.rewards.sandbox.forms import Step, Tests
from lrl.system.processes import die_with

Isolation = Literal["bubblewrap", "none"]
START_S = 30.0
"""Seconds for the start of a sandbox, and for each answer of its runner beyond the time limit."""
RUNNER = inspect.getsource(calls) + inspect.getsource(runner)
_NOBODY = 65534
"""The user of the sandbox where root runs lrl: the kernel limits no processes of root."""
_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    # A verdict depends on the program alone, not on the order of a set.
    "PYTHONHASHSEED": "0",
}
"""All variables of a program, and of bwrap."""
_OPTIONS = ("-s", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")
"""Options of Python: without the user's packages, without writing bytecode, all text in UTF-8, and
integers of any length as text."""


class Run(NamedTuple):
    """The outcome of a run of the program."""

    output: str
    why: str  # how it ended: the limit, the last line of its standard error, or its status
    status: int  # its exit status, or minus the signal that has ended it
    limit: str  # which has ended it; empty if none has
    is_last: bool  # whether that was a limit of all runs together
    passed: set[int]  # numbers of the steps that have passed


@dataclass(frozen=True)
class Sandbox:
    """A kind of sandbox, and the limits of a program in it; see `lrl.rewards.Code`."""

    timeout_s: float = 4.0
    memory_mib: int = 512
    cpu_s: int = 2
    max_processes: int = 8
    max_output_bytes: int = 2**20
    isolation: Isolation = "bubblewrap"
    python: str = ""

    @property
    def user(self) -> int | None:
        """The user that programs run as; None for this one."""
        is_root = os.geteuid() == 0
        return _NOBODY if is_root and self.isolation == "bubblewrap" else None

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Returns the limits of each process, by the names of the module `resource`."""
        limits = {
            "RLIMIT_AS": (self.memory_mib * 2**20,) * 2,
            "RLIMIT_CPU": (self.cpu_s, self.cpu_s + 1),  # first a signal says what has happened
            "RLIMIT_NOFILE": (64, 64),
            "RLIMIT_FSIZE": (32 * 2**20,) * 2,
            "RLIMIT_CORE": (0, 0),
        }
        if self.isolation == "bubblewrap":  # else it would count all processes of the user
            limits["RLIMIT_NPROC"] = (self.max_processes + 2,) * 2  # the runner and the tests
        return limits


@functools.cache
def check(sandbox: Sandbox) -> None:
    """Runs a small program; raises OSError or RuntimeError if it does not run here. What has worked
    in this process is not tried again."""
    with Session(sandbox, "") as session:
        run = session.run(tests=Tests(steps=(Step("assert True"),)))
    if not run.passed:
        raise RuntimeError(f"a small program fails in it ({run.why}): raise its limits")


class Session:
    """A sandbox with a program. Use it in a `with`; at its end nothing of it is left."""

    def __init__(self, sandbox: Sandbox, program: str) -> None:
        self._sandbox = sandbox
        with ExitStack() as resources:
            self._files = [_memory_file(resources) for _ in range(3)]
            """Standard input, output and error of the program."""
            self._link, there = socket.socketpair()
            resources.enter_context(self._link)
            self._link.settimeout(START_S + 2 * sandbox.timeout_s)
            self._answers = resources.enter_context(self._link.makefile("rb"))
            with there:
                self._process = self._started(there.fileno(), resources)
            self._resources = resources.pop_all()
        self._send({"program": program, "rlimits": sandbox.rlimits(), **vars(sandbox)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the sandbox. Its first process ends with bwrap, and all in it with that one."""
        with suppress(ProcessLookupError):  # without bwrap the runner may have ended before others
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(START_S)
        self._resources.close()

    def run(self, stdin: str = "", tests: Tests | None = None, ends_at_failure: bool = True) -> Run:
        """Runs the program once, with the steps of tests beside it if there are any; raises an
        error if the machine is to blame for its end, ValueError if it lacks what the tests import.
        """
        self._files[0].write(stdin.encode())
        self._files[0].seek(0)  # the place in a file is one for both ends
        oom_kills = _oom_kills()
        self._send(tests is not None)
        if tests is not None:
            self._send(tests._asdict() | {"ends_at_failure": ends_at_failure})
        passed: set[int] = set()
        while True:
            match self._answer():
                case ["passed", number]:
                    passed.add(number)
                case ["ended", status]:
                    if status == -signal.SIGKILL and oom_kills != _oom_kills():
                        raise RuntimeError("Linux has ended the program: it is out of memory")
                    return self._outcome(passed, status=status)
                case ["over", limit]:
                    return self._outcome(passed, limit=limit, is_last=True)
                case ["unfit", reason]:
                    raise ValueError(
                        f"the tests cannot run: {reason}. Set Code.python to a Python that has it, "
                        "or import `solution` for the program"
                    )
                case ["busy"]:
                    raise TimeoutError(
                        "the machine is too busy: it gave the program no processor for half of "
                        f"{2 * self._sandbox.timeout_s:g} s. Lower data.reward_workers, or raise "
                        "timeout_s"
                    )

    def _outcome(
        self, passed: set[int], status: int = 0, limit: str = "", is_last: bool = False
    ) -> Run:
        output, written = self._written(1), self._written(2)
        for file in self._files:
            file.seek(0)
            file.truncate()
        error = (written.strip().splitlines() or [""])[-1][:300]
        if status == -signal.SIGXCPU:
            limit = f"the limit of {self._sandbox.cpu_s} s of CPU time"
        elif error.startswith("MemoryError"):
            limit = limit or f"the limit of {self._sandbox.memory_mib} MiB of memory"
        why = limit or error or f"the program ended with status {status}"
        return Run(output, why, status=status, limit=limit, is_last=is_last, passed=passed)

    def _written(self, file: int) -> str:
        most = self._sandbox.max_output_bytes
        return os.pread(self._files[file].fileno(), most, 0).decode(errors="replace")

    def _send(self, message: Any) -> None:
        text = json.dumps(message).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is said by no answer
            self._link.sendall(len(text).to_bytes(8, "big") + text)

    def _answer(self) -> Any:
        try:
            line = self._answers.readline()
        except TimeoutError as error:
            raise TimeoutError("the machine is too busy: the sandbox does not answer") from error
        except ConnectionResetError:
            line = b""
        if not line:
            status = self._process.wait(START_S)
            said = self._written(2).strip()[-300:] or "it has said nothing"
            raise RuntimeError(
                f"the sandbox did not start, or was ended from outside, as Linux does when the "
                f"machine is out of memory (status {status}): {said}"
            )
        return json.loads(line)

    def _started(self, link: int, resources: ExitStack) -> subprocess.Popen[bytes]:
        sandbox = self._sandbox
        python, folders = interpreter(sandbox.python, sandbox.user)
        command = [python, *_OPTIONS, "-c", RUNNER, str(link)]
        files = [link]
        if sandbox.isolation == "none":
            folder = resources.enter_context(TemporaryDirectory())
        else:
            folder = "/"
            rules = _memory_file(resources)
            rules.write(seccomp_filter(platform.machine()))
            rules.seek(0)
            files.append(rules.fileno())
            command = [*bwrap_command(folders, rules.fileno()), *command]
        owner = os.getpid()
        stdin, stdout, stderr = self._files
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=_ENVIRONMENT,
            pass_fds=files,
            start_new_session=True,
            preexec_fn=lambda: _prepare(owner, sandbox.user),
        )


def _prepare(owner: int, user: int | None) -> None:
    """Binds this process to its owner, and has it run as its user."""
    # Linux ends the sandbox before the trainer when the machine is out of memory.
    Path("/proc/self/oom_score_adj").write_text("1000")
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    die_with(owner)


def _memory_file(resources: ExitStack) -> BinaryIO:
    """Returns a file that is in memory only, until `resources` are closed."""
    descriptor = os.memfd_create("lrl")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)  # prints come behind all else
    return resources.enter_context(open(descriptor, "r+b", 0))


def _oom_kills() -> str:
    """Returns the number of processes that the kernel has ended for lack of memory."""
    return Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].partition("\n")[0]
