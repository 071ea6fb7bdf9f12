"""A vLLM server that many runs use, one after another: this saves the start of a server, half a
minute each.

Every run syncs its own weights at its start, so the earlier weights of the server do not matter, as
long as all runs have policies of one architecture.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lrl
from lrl.generators.server import Server
from lrl.run import Run


class LentServer(Server):
    """A server that a run starts if it is not running, and never stops."""

    def start(self) -> None:
        if not self.alive:
            super().start()

    def stop(self) -> None:
        pass

    def end(self) -> None:
        super().stop()


class Borrowing(lrl.AsyncSingleDevice):
    """The strategy with lent servers instead of servers that it starts.

    Args:
        server: The server.
        capacity: Rollouts it writes at once; its other places are for evaluations.
        others: More servers like it (`lent_servers`), each a generator.
        **how: Other settings of the strategy.
    """

    def __init__(
        self, server: LentServer, capacity: int, others: Sequence[LentServer] = (), **how: Any
    ) -> None:
        settings = replace(server.settings, max_num_seqs=capacity)
        devices = {"generator_devices": 1 + len(others)}
        super().__init__(weight_transfer=server.backend, server=settings, **(devices | how))
        self.lent = [server, *others]
        # The server's supervisor removes the weights' file if this process is killed.
        self.run_id = server.run_id

    def make_servers(self, run: Run) -> list[Server]:
        return list(self.lent)


@contextmanager
def lent_servers(
    count: int,
    model: Path,
    settings: lrl.ServerSettings,
    folder: Path,
    devices: Sequence[int] = (),
) -> Iterator[list[LentServer]]:
    """Lends servers to one run at a time; they start with their first run and end with this
    context.

    Args:
        count: How many.
        model: A policy of the runs' architecture.
        settings: As for a run of its own.
        folder: Of their logs.
        devices: CUDA indices of each; none is the CPU.
    """
    run_id = secrets.token_hex(4)
    with ExitStack() as ends:
        servers = [
            LentServer(str(model), settings, "shared_memory", list(devices), folder, n, run_id)
            for n in range(count)
        ]
        for server in servers:
            ends.callback(server.end)
        yield servers


@contextmanager
def lent_server(
    model: Path, settings: lrl.ServerSettings, folder: Path, devices: Sequence[int] = ()
) -> Iterator[LentServer]:
    with lent_servers(1, model, settings, folder, devices) as servers:
        yield servers[0]
