"""The Python that runs in the sandbox, and the folders of it that must be there."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_SYSTEM_PYTHON = "/usr/bin/python3"
_ANSWER_S = 20.0
_FOLDERS = (
    "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.base_exec_prefix]))"
)


class Interpreter(NamedTuple):
    """A Python, and the folders that it needs."""

    path: str
    folders: tuple[str, ...]


@functools.cache
def interpreter(python: str, for_others: bool) -> Interpreter:
    """Returns the Python of a sandbox.

    Args:
        python: Path of an interpreter; empty for the one of this process without its packages, or
            the system's if that one is closed to other users and has to be open to them.
        for_others: Whether another user runs it.

    Raises:
        RuntimeError: There is none, or it does not run.
    """
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    chosen = python or own
    if for_others and not _is_open_to_others(chosen):
        if python or not os.path.exists(_SYSTEM_PYTHON):
            raise RuntimeError(
                f"lrl runs as root, the sandbox as another user, and that one cannot reach {chosen}: "
                "set `python` to an interpreter that all users may run"
            )
        chosen = _SYSTEM_PYTHON
    if chosen == own:
        return Interpreter(own, _different([sys.base_prefix, sys.base_exec_prefix]))
    try:
        said = subprocess.run(
            [chosen, "-I", "-c", _FOLDERS], capture_output=True, check=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"{chosen} does not run as a Python: {error}") from error
    return Interpreter(os.path.abspath(chosen), _different(json.loads(said.stdout)))


def _is_open_to_others(path: str) -> bool:
    """Whether every user may run a program: its file and all folders above it are open."""
    file = Path(os.path.realpath(path))
    return all(place.exists() and place.stat().st_mode & 0o001 for place in (file, *file.parents))


def _different(folders: list[str]) -> tuple[str, ...]:
    """Returns the folders outside of /usr, which is there anyway, each once."""
    outside = [each for each in folders if not Path(each).is_relative_to("/usr")]
    if "/" in outside:
        raise RuntimeError("the interpreter's folder is /: all files would be in the sandbox")
    return tuple(dict.fromkeys(outside))
