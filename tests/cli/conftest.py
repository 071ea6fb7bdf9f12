"""The command in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs `lrl` with these words; returns its exit status, stdout and stderr."""
    from lrl.cli.main import main

    monkeypatch.setattr(sys, "argv", ["lrl"])

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([*map(str, words)])
        except SystemExit as end:
            status = int(end.code or 0)
        written = capsys.readouterr()
        return status, written.out, written.err

    return run
