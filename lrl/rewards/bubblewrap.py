"""The command line of bubblewrap: namespaces, and the few files that a Python needs.

Everything is named that is there; all else is not. `--as-pid-1`: with a process of bwrap as number
1, its `/proc/1/environ` would be in the sandbox. `--disable-userns` is younger than some bwraps;
the filter of system calls does the same.
"""

import os
from collections.abc import Iterator
from pathlib import Path

TMP_MIB = 64
"""MiB of files in `/tmp`, and in `/dev/shm`."""
ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    # A verdict depends on the program alone, not on the order of a set.
    "PYTHONHASHSEED": "0",
}
"""All variables of a program."""
_DEVICES = ("null", "zero", "random", "urandom")
_LIBRARIES = ("/lib", "/lib32", "/lib64")
_OF_THE_LINKER = ("/etc/ld.so.cache", "/etc/alternatives")


def bwrap_command(path: str, folders: tuple[str, ...], filter_file: int) -> list[str]:
    """Returns the command that runs, in the sandbox, the program whose words follow it.

    Args:
        path: That of bwrap.
        folders: What the program may read besides the system's libraries.
        filter_file: File descriptor of the filter of system calls.
    """
    variables = (["--setenv", name, value] for name, value in ENVIRONMENT.items())
    return [
        path,
        *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"),
        *("--hostname", "sandbox", "--cap-drop", "ALL", "--seccomp", str(filter_file)),
        *("--as-pid-1", "--die-with-parent", "--new-session"),
        *_files(folders),
        *(word for words in variables for word in words),
        "--chdir",
        "/tmp",
        "--",
    ]


def _files(folders: tuple[str, ...]) -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for library in _LIBRARIES:
        if os.path.islink(library):
            yield from ("--symlink", os.readlink(library), library)
        elif Path(library).is_dir():
            yield from ("--ro-bind", library, library)
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
        yield from ("--size", str(TMP_MIB * 2**20), "--tmpfs", folder)
    # Else a program could fill the machine's memory with files in the root folder.
    yield from ("--remount-ro", "/")
