"""A program of the tests, in a process of its own: `python -m tests.program MODULE ARGUMENTS` calls
`main` of MODULE.

A spawned reward worker imports the program that was run, and here that is nothing: with Lightning
at the top of the file, every worker took a core nine seconds.
"""

import importlib
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start(module: str, output: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts it; what it prints, errors too, is in a file."""
    words = [sys.executable, "-m", "tests.program", module, *arguments]
    with output.open("w") as file:
        return subprocess.Popen(words, cwd=ROOT, text=True, stdout=file, stderr=file)


if __name__ == "__main__":
    from lrl.system.imports import quick_imports

    # Tests that a shell runs in the background inherit its ignored SIGINT, and so would this
    # program.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with quick_imports():
        program = importlib.import_module(sys.argv[1])
    program.main(*sys.argv[2:])
