"""Ctrl-C while a command still imports ends it at once, without a word of Python's."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

AT_AN_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *where):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
sys.meta_path.insert(0, Interrupts())
from lrl.cli.main import main
sys.exit(main({words!r}))
"""
IMPORTS = {
    "fit": ("torch", "yaml"),
    "chat": ("transformers",),
    "doctor": ("lrl.cli.doctor",),
}


@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for command, names in IMPORTS.items() for name in names]
)
def test_an_interrupt_of_an_import_ends_a_command_without_a_traceback(
    command: str, name: str, quickstart_policy: object
) -> None:
    words = {
        "fit": ["fit", "--config", "quickstart"],
        "chat": ["chat", str(quickstart_policy), "1+1="],
    }
    code = AT_AN_IMPORT.format(name=name, words=words.get(command, [command]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT), done.stderr
    assert not done.stderr.strip() and not done.stdout.strip()
