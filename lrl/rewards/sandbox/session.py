"""A sandbox, seen from outside: starts it, and asks for runs of its program.

A program there has its own processes, network (without a way out), `/proc` and a small `/tmp`, and
of this machine's files those that Python needs, which it cannot change. It is told nothing of the
trainer: the environment is empty, also bwrap's own. `isolation: none` is a process of this user
with the same limits, for programs that one trusts.

The runner inside says how a run ended, and that is the program's doing. Whatever else ends the
sandbox is the machine's fault, and an error.
"""

import fcntl
import inspect
import json
import os
import platform
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, Self

from lrl.rewards.sandbox import calls, runner
from lrl.rewards.sandbox.bubblewrap import ENVIRONMENT, bwrap_command, interpreter, seccomp_filter
from lrl.system.processes import die_with

Isolation = Literal["bubblewrap", "none"]
START_S = 30.0
"""Seconds for the start of a sandbox, and for each answer of its runner beyond the time limit."""
MODULES = ("solution", "program", "main", "submission")
"""Names under which tests may import the program."""
RUNNER = inspect.getsource(calls) + inspect.getsource(runner)
_NOBODY = 65534
"""The user of the sandbox where root runs lrl: the kernel limits no processes of root."""
_OPTIONS = ("-s", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")
"""Options of Python: without the user's packages, without writing bytecode, all text in UTF-8, and
integers of any length as text."""
_working: set["Sandbox"] = set()


class Step(NamedTuple):
    """A piece of a row's tests, which runs after the program, beside it."""

    source: str
    is_test: bool = True
    """Whether it counts; else a failure of it fails all that come later."""


class Run(NamedTuple):
    """The outcome of a run of the program."""

    output: bytes
    error: str
    """The last line of its standard error."""
    status: int
    """Its exit status, or minus the signal that has ended it."""
    limit: str
    """The limit that has ended it; empty if none has."""
    is_last: bool
    """Whether that was a limit of all runs together."""
    passed: frozenset[int]
    """Numbers of the steps that have passed."""
    unfit: str
    """Why the tests cannot run here, whatever the program; empty if they can."""


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
    def is_isolated(self) -> bool:
        """Whether bubblewrap is used."""
        return self.isolation == "bubblewrap"

    @property
    def is_by_nobody(self) -> bool:
        """Whether programs run as another user than this one."""
        return self.is_isolated and os.geteuid() == 0

    @property
    def interpreter_path(self) -> str:
        """The Python that runs in it; raises RuntimeError if there is none."""
        return interpreter(self.python, self.is_by_nobody)[0]

    def fault(self) -> str:
        """Returns why a small program does not run here; empty if it does. What has worked in this
        process is not tried again."""
        if self in _working:
            return ""
        trial = "import threading\nthread = threading.Thread(target=int)\n"
        if self.max_processes > 1:
            trial += "thread.start()\nthread.join()\n"
        try:
            with Session(self, trial) as session:
                run = session.run(steps=[Step("assert True")])
        except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            return str(error)
        if not run.passed:
            why = run.error or run.limit or "it has ended early"
            return f"a small program fails in it ({why}): raise its limits"
        _working.add(self)
        return ""

    def rlimits(self) -> dict[str, int]:
        """Returns the limits of each process, by the names of the module `resource`."""
        limits = {
            "RLIMIT_AS": self.memory_mib * 2**20,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_FSIZE": 32 * 2**20,
            "RLIMIT_CORE": 0,
        }
        if self.is_isolated:  # else it would count all processes of the user
            limits["RLIMIT_NPROC"] = self.max_processes + 2  # the runner and the tests
        return limits


class Session:
    """A sandbox with a program. Use it in a `with`; at its end nothing of it is left."""

    def __init__(self, sandbox: Sandbox, program: str) -> None:
        self._sandbox = sandbox
        with ExitStack() as resources:
            self._files = [_memory_file(resources) for _ in range(3)]
            """Standard input, output and error of the program."""
            self._link, there = socket.socketpair()
            resources.enter_context(self._link)
            with there:
                self._process = self._started(there.fileno(), resources)
            self._resources = resources.pop_all()
        self._link.settimeout(START_S + 2 * sandbox.timeout_s)
        self._answers = self._link.makefile("rb")
        limits = {"timeout_s": sandbox.timeout_s, "max_output_bytes": sandbox.max_output_bytes}
        self._send({"program": program, "rlimits": sandbox.rlimits(), **limits})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the sandbox. Its first process ends with bwrap, and all in it with that one."""
        with suppress(ProcessLookupError):  # without bwrap the runner may have ended before others
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(START_S)
        self._answers.close()
        self._resources.close()

    def run(
        self,
        stdin: bytes = b"",
        steps: Sequence[Step] = (),
        names: Sequence[str] = (),
        ends_at_failure: bool = True,
    ) -> Run:
        """Runs the program once; raises an error if the machine is to blame for its end.

        The steps run after it, in a process that calls it, and see those of its `names`.
        """
        os.ftruncate(self._files[0], 0)
        with open(self._files[0], "wb", closefd=False) as its_input:
            its_input.write(stdin)
        os.lseek(self._files[0], 0, os.SEEK_SET)  # the place is one for both ends
        oom_kills = _oom_kills()
        self._send(bool(steps))
        if steps:
            classes = [name for name in names if name[:1].isupper()]
            how = {"classes": classes, "modules": MODULES, "ends_at_failure": ends_at_failure}
            self._send({"steps": steps, "names": names, **how})
        begun = False
        passed: set[int] = set()
        unfit = ""
        while True:
            match self._answer(begun):
                case ["begun"]:
                    begun = True
                case ["passed", number]:
                    passed.add(number)
                case ["unfit", unfit]:
                    pass
                case ["busy"]:
                    raise TimeoutError(
                        "the machine is too busy: it gave the program no processor for half of "
                        f"{2 * self._sandbox.timeout_s:g} s. Lower data.reward_workers, or raise "
                        "timeout_s"
                    )
                case ["ended" | "over" as kind, status, limit]:
                    if status == -signal.SIGKILL and not limit and oom_kills != _oom_kills():
                        raise RuntimeError("Linux has ended the program: it is out of memory")
                    break
        error = self._last_error()
        if error.startswith("MemoryError"):
            limit = limit or f"the limit of {self._sandbox.memory_mib} MiB of memory"
        output = os.pread(self._files[1], self._sandbox.max_output_bytes, 0)
        for file in self._files[1:]:
            os.ftruncate(file, 0)
        return Run(
            output=output,
            error=error,
            status=status,
            limit=limit,
            is_last=kind == "over",
            passed=frozenset(passed),
            unfit=unfit,
        )

    def _last_error(self) -> str:
        text = os.pread(self._files[2], self._sandbox.max_output_bytes, 0)
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def _send(self, message: Any) -> None:
        text = json.dumps(message).encode()
        with suppress(BrokenPipeError, ConnectionResetError):  # its end is said by no answer
            self._link.sendall(len(text).to_bytes(8, "big") + text)

    def _answer(self, begun: bool) -> Any:
        try:
            line = self._answers.readline()
        except TimeoutError as error:
            raise TimeoutError("the machine is too busy: the sandbox does not answer") from error
        except ConnectionResetError:
            line = b""
        if line:
            return json.loads(line)
        status = self._process.wait(START_S)
        said = self._last_error() or "it has said nothing"
        if not begun:
            raise RuntimeError(f"the sandbox did not start (status {status}): {said}")
        raise RuntimeError(
            f"the sandbox was ended from outside (status {status}), as Linux does when the machine "
            f"is out of memory: {said}"
        )

    def _started(self, link: int, resources: ExitStack) -> subprocess.Popen[bytes]:
        sandbox = self._sandbox
        python, folders = interpreter(sandbox.python, sandbox.is_by_nobody)
        command = [python, *_OPTIONS, "-c", RUNNER, str(link)]
        owner = os.getpid()
        stdin, stdout, stderr = self._files
        with ExitStack() as until_started:
            files = [link]
            if sandbox.is_isolated:
                folder = "/"
                environment = {}
                rules = _memory_file(until_started)
                os.write(rules, seccomp_filter(platform.machine()))
                os.lseek(rules, 0, os.SEEK_SET)
                files.append(rules)
                command = [*bwrap_command(folders, rules), *command]
            else:
                folder = resources.enter_context(TemporaryDirectory())
                environment = ENVIRONMENT | {"HOME": folder}
            return subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env=environment,
                pass_fds=files,
                start_new_session=True,
                preexec_fn=lambda: _prepare(owner, sandbox.is_by_nobody),
            )


def _prepare(owner: int, is_by_nobody: bool) -> None:
    """Binds this process to its owner, and has it run as its user."""
    # Linux ends the sandbox before the trainer when the machine is out of memory.
    Path("/proc/self/oom_score_adj").write_text("1000")
    if is_by_nobody:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)
    die_with(owner)


def _memory_file(resources: ExitStack) -> int:
    """Returns the descriptor of a file that is in memory only, until `resources` are closed."""
    file = os.memfd_create("lrl")
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
    resources.callback(os.close, file)
    return file


def _oom_kills() -> str:
    """Returns the kernel's line with the number of processes ended for lack of memory."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next((line for line in lines if line.startswith("oom_kill ")), "")
