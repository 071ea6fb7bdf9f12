"""A command of lrl in the hub's folder and with the server of another process, as a program of
`tests.strategies.forked_ranks`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lrl.cli.main import main as lrl
from lrl.run import Run
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system.endpoint import Location
from tests.lent_server import end_half_sync
from tests.strategies.run_of_ranks import ServerElsewhere


def main(hub: Path, url: str, token: str, words: Sequence[str]) -> None:
    """Runs the command.

    Args:
        hub: Folder in which the hub's names are folders.
        url: The server's.
        token: The same.
        words: Those after `lrl`.
    """

    def borrow(strategy: Any, run: Run) -> list[Any]:
        end_half_sync(url, token)
        return [ServerElsewhere(0, Location(url), token, strategy.settings_of(run))]

    GeneratorDevices.make_servers = borrow  # type: ignore[method-assign]
    os.chdir(hub)
    sys.argv = ["lrl"]
    raise SystemExit(lrl(words))
