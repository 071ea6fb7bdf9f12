"""A command of lrl in the hub's folder and with the server of another process, as a program of
`tests.strategies.forked_ranks`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lrl.cli.main import main as lrl
from tests.lent_server import borrow


def main(hub: Path, url: str, token: str, words: Sequence[str]) -> None:
    """Runs the command.

    Args:
        hub: Folder in which the hub's names are folders.
        url: The server's.
        token: The same.
        words: Those after `lrl`.
    """
    borrow(url, token)
    os.chdir(hub)
    sys.argv = ["lrl"]
    raise SystemExit(lrl(words))
