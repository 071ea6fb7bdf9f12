"""Checks that no file shadows lrl or Python's own modules in a new process of a run.

A process that is up has the right modules. A process of rewards or of an environment begins anew,
with this one's `sys.path`, and until it has that, with the current folder in front.
"""

import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import lrl
from lrl.errors import ConfigError

LIST_OWN = """
import os, sys
try:
    import multiprocessing.spawn
finally:
    files = [str(getattr(module, "__file__", "")) for module in list(sys.modules.values())]
    print(*(file for file in files if os.path.dirname(file) == os.getcwd()))
"""
"""Begins as a worker does, and prints the files of the current folder that it has imported."""
START_S = 60.0
"""Seconds for the start of Python."""


def check_lrl() -> None:
    """Raises a ConfigError if a new process with this one's `sys.path` would import something else
    as lrl.

    It would take a folder `lrl`, such as a clone, where lrl itself comes from an import hook.
    """
    spec = PathFinder.find_spec("lrl")
    if spec is None:  # it comes from an import hook
        return
    own_folders = [Path(folder).resolve() for folder in lrl.__path__]
    found = [Path(folder) for folder in spec.submodule_search_locations or [spec.origin or ""]]
    if other := [folder for folder in found if folder.resolve() not in own_folders]:
        raise ConfigError(
            f"Worker processes would import {other[0]} as lrl, and not {own_folders[0]}. Start the "
            "run in another folder, or rename that one."
        )


def check_start() -> None:
    """Raises a ConfigError if a new process takes a file of the current folder for a module of
    Python's own.

    A file `signal.py` is enough for that.
    """
    flags = ["-P"] if sys.flags.safe_path else []
    done = subprocess.run(
        [sys.executable, *flags, "-c", LIST_OWN], capture_output=True, text=True, timeout=START_S
    )
    *_, files = done.stdout.splitlines() or [""]
    if files:
        raise ConfigError(
            f"Worker processes cannot start: they import {files} in the place of Python's own module "
            "of that name. Rename the file, or start the run in another folder."
        )
