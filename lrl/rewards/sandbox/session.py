"""A sandbox, seen from outside: starts it, and asks for runs of its program.

A program has its own processes, network (without a way out), `/proc` and small `/tmp`; of this
machine it reads the files that Python needs, and nothing tells it of the trainer.

The runner inside says how a run ended, which is the program's doing. Whatever else ends the sandbox
is the machine's fault, and an error.
"""

import errno
import fcntl
import functools
import inspect
import json
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Literal, NamedTuple

from lrl.rewards.sandbox import calls, runner
from lrl.rewards.sandbox.forms import Step, Tests
from lrl.system.machine import memory_file
from lrl.system.processes import die_with

Isolation = Literal["bubblewrap", "none"]
START_S = 30.0  # for its end
RUNNER = inspect.getsource(calls) + inspect.getsource(runner)
_NOBODY = 65534  # in place of root, whose processes the kernel does not limit
_ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # a verdict does not depend on the order of a set
}
"""All variables of a program, and of bwrap."""
# Without the user's packages and bytecode, all text in UTF-8, integers of any length as text.
_OPTIONS = ("-s", "-B", "-X", "utf8", "-X", "int_max_str_digits=0")


class Run(NamedTuple):
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
        is_root = os.geteuid() == 0
        return _NOBODY if is_root and self.isolation == "bubblewrap" else None

    @property
    def deadline_s(self) -> float:
        """Seconds for a run and its start on a busy machine."""
        return 2 * self.timeout_s + 5.0

    def rlimits(self) -> dict[str, tuple[int, int]]:
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
    """Runs a small program, once in this process; raises OSError or RuntimeError if it fails
    here."""
    with opened(sandbox, "", Tests(steps=(Step("assert True"),))) as session:
        run = session.run()
    if not run.passed:
        raise RuntimeError(f"a small program fails in it ({run.why}): raise its limits")


@contextmanager
def opened(
    sandbox: Sandbox, program: str, tests: Tests | None = None, ends_at_failure: bool = True
) -> Iterator["Session"]:
    """Yields a sandbox with a program, and the steps of tests if there are any; at the end nothing
    of it is left."""
    job = {"program": program, "rlimits": sandbox.rlimits(), "has_tests": tests is not None}
    steps = (tests or Tests())._asdict() | {"ends_at_failure": ends_at_failure}
    with ExitStack() as resources:
        files = [_memory_file(resources) for _ in range(3)]
        link, there = map(resources.enter_context, socket.socketpair())
        link.settimeout(sandbox.deadline_s)
        texts = [json.dumps(each).encode() for each in (vars(sandbox) | job, steps)]
        for_runner = [there, *(_memory_file(resources, text) for text in texts)]
        process = _started(sandbox, files, for_runner, resources)
        there.close()
        try:
            yield Session(sandbox, files, link, process)
        finally:  # its first process ends with bwrap, and all in it with that one
            with suppress(ProcessLookupError):  # without bwrap it may have ended before others
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(START_S)


@dataclass
class Session:
    sandbox: Sandbox
    files: list[BinaryIO]  # standard input, output and error of the program
    link: socket.socket
    process: subprocess.Popen[bytes]

    def run(self, stdin: str = "") -> Run:
        """Runs the program once; raises an error if the machine is to blame for its end, ValueError
        if it lacks what the tests import."""
        self.files[0].write(stdin.encode())
        self.files[0].seek(0)  # the place in a file is one for both ends
        try:
            with suppress(ConnectionError):
                return self._run_to_its_end()
        except TimeoutError as error:
            raise TimeoutError(
                "the machine is too busy: the program got no processor. Lower data.reward_workers, "
                "or raise timeout_s"
            ) from error
        status = self.process.wait(START_S)
        said = self._written(2).strip()[-300:] or "it has said nothing"
        raise RuntimeError(
            f"the sandbox did not start, or was ended from outside, as Linux does when the machine "
            f"is out of memory (status {status}): {said}"
        )

    def _run_to_its_end(self) -> Run:
        oom_kills = _oom_kills()
        passed: set[int] = set()
        self.link.sendall(b"\n")
        for line in self.link.makefile("rb"):
            match json.loads(line):
                case ["passed", number]:
                    passed.add(number)
                case ["unfit", reason]:
                    raise ValueError(
                        f"the tests cannot run: {reason}. Set Code.python to a Python that has it, "
                        "or import `solution` for the program"
                    )
                case ["ended", status, over]:
                    if status == -signal.SIGKILL and not over and oom_kills != _oom_kills():
                        raise RuntimeError("Linux has ended the program: it is out of memory")
                    return self._outcome(status, over, passed)
        raise ConnectionError("the sandbox has ended instead")

    def _outcome(self, status: int, over: str, passed: set[int]) -> Run:
        output, written = self._written(1), self._written(2)
        for file in self.files:
            file.seek(0)
            file.truncate()
        error = (written.strip().splitlines() or [""])[-1][:300]
        limit = over
        if status == -signal.SIGXCPU:
            limit = over or f"the limit of {self.sandbox.cpu_s} s of CPU time"
        elif error.startswith("MemoryError"):
            limit = over or f"the limit of {self.sandbox.memory_mib} MiB of memory"
        why = limit or error or f"the program ended with status {status}"
        return Run(output, why, status, limit, is_last=bool(over), passed=passed)

    def _written(self, file: int) -> str:
        most = self.sandbox.max_output_bytes
        return os.pread(self.files[file].fileno(), most, 0).decode(errors="replace")


def _started(
    sandbox: Sandbox, files: list[BinaryIO], for_runner: list[Any], resources: ExitStack
) -> subprocess.Popen[bytes]:
    python, folders = interpreter(sandbox.python, sandbox.user)
    passed = [file.fileno() for file in for_runner]
    command = [python, *_OPTIONS, "-c", RUNNER, *map(str, passed)]
    if sandbox.isolation == "none":
        folder = resources.enter_context(TemporaryDirectory())
    else:
        folder = "/"
        rules = _memory_file(resources, seccomp_filter(platform.machine())).fileno()
        passed.append(rules)
        command = [*bwrap_command(folders, rules), *command]
    owner = os.getpid()
    stdin, stdout, stderr = files
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=_ENVIRONMENT,
        pass_fds=passed,
        start_new_session=True,
        preexec_fn=lambda: _prepare(owner, sandbox.user),
    )


def _prepare(owner: int, user: int | None) -> None:
    # Linux ends the sandbox before the trainer when the machine is out of memory.
    Path("/proc/self/oom_score_adj").write_text("1000")
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    die_with(owner)


def _memory_file(resources: ExitStack, content: bytes = b"") -> BinaryIO:
    descriptor = memory_file("lrl")
    os.pwrite(descriptor, content, 0)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)  # prints come behind all else
    return resources.enter_context(open(descriptor, "r+b", 0))


def _oom_kills() -> str:
    return Path("/proc/vmstat").read_text().partition("\noom_kill ")[2].partition("\n")[0]


# ---- the walls: bubblewrap with namespaces and the few files that a Python needs
#
# What is there is named. `--as-pid-1`: with a process of bwrap as number 1, its `/proc/1/environ`
# would be in the sandbox. `--disable-userns` is younger than some bwraps; the filter of system
# calls does the same.

_WALLS = """
--unshare-all --unshare-user --uid 1000 --gid 1000 --hostname sandbox --cap-drop ALL
--as-pid-1 --die-with-parent --new-session --chdir /tmp
--ro-bind /usr /usr --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache
--ro-bind-try /etc/alternatives /etc/alternatives
--proc /proc --tmpfs /proc/1 --remount-ro /proc/1 --remount-ro /proc
--dev-bind /dev/null /dev/null --dev-bind /dev/zero /dev/zero
--dev-bind /dev/random /dev/random --dev-bind /dev/urandom /dev/urandom
--symlink /proc/self/fd/0 /dev/stdin --symlink /proc/self/fd/1 /dev/stdout
--symlink /proc/self/fd/2 /dev/stderr
--size 67108864 --tmpfs /tmp --size 67108864 --tmpfs /dev/shm
--remount-ro /
"""
"""`/proc/1` is empty: whoever writes in the memory of process 1 or opens its files is free of what
limits a program. In a root folder that can be written files could fill the machine's memory."""
_PREFIXES = (
    "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
)


def bwrap_command(folders: tuple[str, ...], filter_file: int) -> list[str]:
    """Returns the command that runs the words behind it in the sandbox, with `folders` to read;
    raises RuntimeError if none can run here."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise RuntimeError("bwrap is not on PATH: sudo apt-get install bubblewrap")
    if platform.machine() not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise RuntimeError(f"the sandbox knows {known}, not {platform.machine()}")
    libraries = [path for path in ("/lib", "/lib32", "/lib64") if os.path.exists(path)]
    links = {path: os.readlink(path) for path in libraries if os.path.islink(path)}
    words = [bwrap, "--seccomp", str(filter_file)]
    for path in (*libraries, *folders):
        words += ["--symlink", links[path], path] if path in links else ["--ro-bind", path, path]
    return [*words, *_WALLS.split(), "--"]


@functools.cache
def interpreter(python: str, user: int | None) -> tuple[str, tuple[str, ...]]:
    """Returns the Python that a user can run, and the folders outside of /usr that it needs:
    without a path that of this process, or the system's if the user cannot reach it. RuntimeError
    if none."""
    how: dict[str, Any] = {"stderr": subprocess.DEVNULL, "cwd": "/", "env": {}, "timeout": 20.0}
    if user is not None:
        how |= {"user": user, "group": user, "extra_groups": []}
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    for path in [os.path.abspath(python)] if python else [own, "/usr/bin/python3"]:
        command = [path, "-I", "-c", _PREFIXES]
        try:
            said = subprocess.check_output(command, **how)
        except (OSError, subprocess.SubprocessError) as error:
            found = f"{path} does not run as a Python: {error}"
            continue
        outside = {each for each in json.loads(said) if not Path(each).is_relative_to("/usr")}
        if "/" in outside:
            raise RuntimeError("the interpreter's folder is /: all files would be in the sandbox")
        return path, tuple(outside)
    raise RuntimeError(found)


# ---- system calls that no program may make
#
# The namespaces hide what is outside. The filter closes what they do not: parts of the kernel that
# are seldom needed and often broken, memory that no limit counts, and sockets that know no network
# namespace (VSOCK reaches the host of a virtual machine).

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # `platform.machine()`: the kernel's
_CALLS = """
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272
pidfd_getfd 438 438, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427
keyctl 250 219, add_key 248 217, request_key 249 218, fanotify_init 300 262
personality 135 92, modify_ldt 154 -1, iopl 172 -1, ioperm 173 -1
mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, open_tree 428 428
move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433
mount_setattr 442 442, unshare 272 97, setns 308 268
name_to_handle_at 303 264, open_by_handle_at 304 265
kexec_load 246 104, kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225
init_module 175 105, finit_module 313 273, delete_module 176 106
acct 163 89, quotactl 179 60, syslog 103 116
memfd_create 319 279, memfd_secret 447 447, shmget 29 194, semget 64 190, msgget 68 186
"""
DENIED = [call.split() for call in _CALLS.strip().replace("\n", ", ").split(", ")]
"""Each call with its numbers on x86_64 and on aarch64, where -1 is none."""
_NEW_NAMESPACES = 0x7E020000  # flags of `clone`
_OTHER_ABI = 0x40000000  # where the numbers of x32 begin, the second set of x86_64

_Instruction = tuple[int, int, int, int]
_LOAD_NUMBER = (0x20, 0, 0, 0)
_LOAD_ARCHITECTURE = (0x20, 0, 0, 4)
_LOAD_FIRST_ARGUMENT = (0x20, 0, 0, 16)
_ALLOW = (0x06, 0, 0, 0x7FFF0000)


def seccomp_filter(machine: str) -> bytes:
    """Returns the filter for bwrap's `--seccomp`: instructions of classic BPF."""
    column = list(ARCHITECTURES).index(machine)
    refuse = _fail(errno.EPERM)
    program = [
        _LOAD_ARCHITECTURE,
        (0x15, 1, 0, ARCHITECTURES[machine]),  # over the next one if equal
        refuse,
        _LOAD_NUMBER,
        (0x35, 0, 1, _OTHER_ABI),  # over the next one if less
        refuse,
    ]
    for call in DENIED:
        if (number := int(call[1 + column])) >= 0:
            program += _if_equal(number, [refuse])
    # clone3: its flags are in memory, which a filter cannot read. Libraries take `clone` then.
    program += _if_equal(435, [_fail(errno.ENOSYS)])
    families = [step for family in (1, 2, 10) for step in _if_equal(family, [_ALLOW])]
    families.append(_fail(errno.EAFNOSUPPORT))
    by_first_argument = {
        (56, 220): [(0x45, 0, 1, _NEW_NAMESPACES), refuse, _ALLOW],  # clone; over it if no bit is
        # prctl(PR_SET_PDEATHSIG): by this signal the sandbox ends with the process that started it.
        (157, 167): [*_if_equal(1, [refuse]), _ALLOW],
        # prlimit: of the first process; 0 is the caller.
        (302, 261): [*_if_equal(0, [_ALLOW]), refuse],
        # socket and socketpair but for AF_UNIX, AF_INET, AF_INET6: others load parts of the kernel.
        (41, 198): families,
        (53, 199): families,
    }
    for numbers, block in by_first_argument.items():
        program += _if_equal(numbers[column], [_LOAD_FIRST_ARGUMENT, *block])
    program.append(_ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _fail(error: int) -> _Instruction:
    return (0x06, 0, 0, 0x00050000 | error)


def _if_equal(value: int, block: list[_Instruction]) -> list[_Instruction]:
    return [(0x15, 0, len(block), value), *block]
