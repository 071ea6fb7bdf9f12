"""Whether bubblewrap can make a sandbox on this machine, asked without lrl's own code."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def _lacking() -> str:
    if (program := shutil.which("bwrap")) is None:
        return "bubblewrap is not installed"
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return "" if done.returncode == 0 else f"bubblewrap cannot be used here: {done.stderr.strip()}"


LACKING = _lacking()
needs_bubblewrap = pytest.mark.skipif(bool(LACKING), reason=LACKING)
