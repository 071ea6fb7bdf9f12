"""The walls of the sandbox: bubblewrap with namespaces and the few files that a Python needs, and a
filter of system calls (seccomp).

Everything is named that is there; all else is not. `--as-pid-1`: with a process of bwrap as number
1, its `/proc/1/environ` would be in the sandbox. `--disable-userns` is younger than some bwraps;
the filter of system calls does the same.
"""

import errno
import functools
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    # A verdict depends on the program alone, not on the order of a set.
    "PYTHONHASHSEED": "0",
}
"""All variables of a program."""
_TMP_MIB = 64
"""MiB of files in `/tmp`, and in `/dev/shm`."""
_PREFIXES = (
    "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
)


def bwrap_command(folders: tuple[str, ...], filter_file: int) -> list[str]:
    """Returns the command that runs, in the sandbox, the program whose words follow it; raises
    RuntimeError if none can run here. It may read `folders` besides the system's libraries."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise RuntimeError("bwrap is not on PATH: sudo apt-get install bubblewrap")
    if platform.machine() not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise RuntimeError(f"the sandbox knows {known}, not {platform.machine()}")
    variables = (["--setenv", name, value] for name, value in ENVIRONMENT.items())
    return [
        bwrap,
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--seccomp", str(filter_file)),
        *("--as-pid-1", "--die-with-parent", "--new-session"),
        *_files(folders),
        *(word for words in variables for word in words),
        *("--chdir", "/tmp", "--"),
    ]


def _files(folders: tuple[str, ...]) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for library in ("/lib", "/lib32", "/lib64"):
        if os.path.islink(library):
            yield from ("--symlink", os.readlink(library), library)
        else:
            yield from ("--ro-bind-try", library, library)
    for file in ("/etc/ld.so.cache", "/etc/alternatives"):  # of the linker
        yield from ("--ro-bind-try", file, file)
    for folder in folders:
        yield from ("--ro-bind", folder, folder)
    # Whoever writes in the memory of process 1 or opens its files is free of what limits a program.
    yield from ("--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
    yield from ("--remount-ro", "/proc")
    for device in ("null", "zero", "random", "urandom"):
        yield from ("--dev-bind", f"/dev/{device}", f"/dev/{device}")
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        yield from ("--symlink", f"/proc/self/fd/{number}", f"/dev/{stream}")
    for folder in ("/tmp", "/dev/shm"):
        yield from ("--size", str(_TMP_MIB * 2**20), "--tmpfs", folder)
    # Else a program could fill the machine's memory with files in the root folder.
    yield from ("--remount-ro", "/")


@functools.cache
def interpreter(python: str, for_others: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the Python of a sandbox, and the folders outside of /usr that it needs; raises
    RuntimeError if there is none.

    Without a path it is that of this process without its packages, or the system's if another user
    has to run it and cannot reach the former.
    """
    path = python or os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if for_others and not _is_open_to_others(path):
        if python:
            raise RuntimeError(f"the sandbox runs as another user, who cannot reach {python}")
        path = "/usr/bin/python3"
    try:
        said = subprocess.run(
            [path, "-I", "-c", _PREFIXES], capture_output=True, check=True, timeout=20.0
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{path} does not run as a Python: {error}") from error
    prefixes = dict.fromkeys(json.loads(said.stdout))
    outside = tuple(each for each in prefixes if not Path(each).is_relative_to("/usr"))
    if "/" in outside:
        raise RuntimeError("the interpreter's folder is /: all files would be in the sandbox")
    return os.path.abspath(path), outside


def _is_open_to_others(path: str) -> bool:
    file = Path(os.path.realpath(path))
    return all(place.exists() and place.stat().st_mode & 0o001 for place in (file, *file.parents))


# ---- system calls that no program may make
#
# The namespaces hide what is outside. The filter closes what they do not: parts of the kernel that
# are seldom needed and often broken, memory that no limit counts, and sockets that know no network
# namespace (VSOCK reaches the host of a virtual machine).

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Name of a machine (`platform.machine()`), and its number in the kernel."""
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
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_PRCTL = (157, 167)
_PRLIMIT = (302, 261)
_SOCKETS = ((41, 198), (53, 199))
"""`socket` and `socketpair`: both load a part of the kernel for a family that is not there yet."""
_NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` that make a namespace."""
_PR_SET_PDEATHSIG = 1
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
_OTHER_ABI = 0x40000000
"""From here on are the calls of x32, the second set of numbers of x86_64."""

_Instruction = tuple[int, int, int, int]
_LOAD_NUMBER = (0x20, 0, 0, 0)
_LOAD_ARCHITECTURE = (0x20, 0, 0, 4)
_LOAD_FIRST_ARGUMENT = (0x20, 0, 0, 16)
_ALLOW = (0x06, 0, 0, 0x7FFF0000)


def seccomp_filter(machine: str) -> bytes:
    """Returns the filter as bwrap's `--seccomp` reads it: instructions of classic BPF for one of
    `ARCHITECTURES`."""
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
    # Its flags are in memory, which a filter cannot read. Without it libraries take `clone`.
    program += _if_equal(_CLONE3[column], [_fail(errno.ENOSYS)])
    makes_namespace = (0x45, 0, 1, _NEW_NAMESPACES)  # over the next one if no bit is set
    program += _if_equal(_CLONE[column], [_LOAD_FIRST_ARGUMENT, makes_namespace, refuse, _ALLOW])
    # The sandbox ends with the process that has started it by this signal.
    death_signal = _if_equal(_PR_SET_PDEATHSIG, [refuse])
    program += _if_equal(_PRCTL[column], [_LOAD_FIRST_ARGUMENT, *death_signal, _ALLOW])
    # The limits of the first process; 0 is the caller.
    program += _if_equal(_PRLIMIT[column], _all_fail_but((0,), errno.EPERM))
    for call_numbers in _SOCKETS:
        program += _if_equal(call_numbers[column], _all_fail_but(_FAMILIES, errno.EAFNOSUPPORT))
    program.append(_ALLOW)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _fail(error: int) -> _Instruction:
    return (0x06, 0, 0, 0x00050000 | error)


def _if_equal(value: int, block: list[_Instruction]) -> list[_Instruction]:
    """Returns a block, and before it a jump over it for all other values."""
    return [(0x15, 0, len(block), value), *block]


def _all_fail_but(allowed: Iterable[int], error: int) -> list[_Instruction]:
    passes = [step for value in allowed for step in _if_equal(value, [_ALLOW])]
    return [_LOAD_FIRST_ARGUMENT, *passes, _fail(error)]
