"""The command line of bubblewrap: namespaces, and the few files that a Python needs.

Everything is named that is there; all else is not. `--as-pid-1`: with a process of bwrap as number
1, its `/proc/1/environ` would be in the sandbox. `--disable-userns` is younger than some bwraps;
the filter of system calls does the same.
"""

import functools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from lrl.rewards.sandbox.seccomp import ARCHITECTURES

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
_DEVICES = ("null", "zero", "random", "urandom")
_LIBRARIES = ("/lib", "/lib32", "/lib64")
_OF_THE_LINKER = ("/etc/ld.so.cache", "/etc/alternatives")
_SYSTEM_PYTHON = "/usr/bin/python3"
_ANSWER_S = 20.0
_PREFIXES = (
    "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
)


def bwrap_command(folders: tuple[str, ...], filter_file: int) -> list[str]:
    """Returns the command that runs, in the sandbox, the program whose words follow it.

    Args:
        folders: What the program may read besides the system's libraries.
        filter_file: File descriptor of the filter of system calls.

    Raises:
        RuntimeError: There is no bwrap, or no filter for this machine.
    """
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
    for library in _LIBRARIES:
        if os.path.islink(library):
            yield from ("--symlink", os.readlink(library), library)
        else:
            yield from ("--ro-bind-try", library, library)
    for file in _OF_THE_LINKER:
        yield from ("--ro-bind-try", file, file)
    for folder in folders:
        yield from ("--ro-bind", folder, folder)
    # Whoever writes in the memory of process 1 or opens its files is free of what limits a program.
    yield from ("--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1")
    yield from ("--remount-ro", "/proc")
    for device in _DEVICES:
        yield from ("--dev-bind", f"/dev/{device}", f"/dev/{device}")
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        yield from ("--symlink", f"/proc/self/fd/{number}", f"/dev/{stream}")
    for folder in ("/tmp", "/dev/shm"):
        yield from ("--size", str(_TMP_MIB * 2**20), "--tmpfs", folder)
    # Else a program could fill the machine's memory with files in the root folder.
    yield from ("--remount-ro", "/")


@functools.cache
def interpreter(python: str, for_others: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the Python of a sandbox, and the folders outside of /usr that it needs.

    Args:
        python: Path of an interpreter; empty for the one of this process without its packages, or
            the system's if that one is closed to other users and has to be open to them.
        for_others: Whether another user runs it.

    Raises:
        RuntimeError: There is none, or it does not run.
    """
    path = python or os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if for_others and not _is_open_to_others(path):
        if python:
            raise RuntimeError(f"the sandbox runs as another user, who cannot reach {python}")
        path = _SYSTEM_PYTHON
    try:
        said = subprocess.run(
            [path, "-I", "-c", _PREFIXES], capture_output=True, check=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{path} does not run as a Python: {error}") from error
    prefixes = dict.fromkeys(json.loads(said.stdout))
    outside = tuple(each for each in prefixes if not Path(each).is_relative_to("/usr"))
    if "/" in outside:
        raise RuntimeError("the interpreter's folder is /: all files would be in the sandbox")
    return os.path.abspath(path), outside


def _is_open_to_others(path: str) -> bool:
    """Whether every user may run a program: its file and all folders above it are open."""
    file = Path(os.path.realpath(path))
    return all(place.exists() and place.stat().st_mode & 0o001 for place in (file, *file.parents))
