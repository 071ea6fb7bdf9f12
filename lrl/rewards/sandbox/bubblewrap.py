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
from pathlib import Path
from typing import Any

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
    """Returns the command that runs, in the sandbox, the program whose words follow it; raises
    RuntimeError if none can run here. It may read `folders` besides the system's libraries."""
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
    """Returns the Python that a user can run, and the folders outside of /usr that it needs; raises
    RuntimeError if there is none.

    Without a path it is that of this process without its packages, or the system's if the user
    cannot reach it.
    """
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
_NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` that make a namespace."""
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
    """Returns a block, and before it a jump over it for all other values."""
    return [(0x15, 0, len(block), value), *block]
