"""A vLLM server that many runs use, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lrl
from lrl.generators.server import JoinedServer, Server
from lrl.generators.settings import ServerSettings
from lrl.run import Run
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system.endpoint import Location
from lrl.weights.pull import Pull
from tests.http_call import call

PARSER = "hermes"
"""Calls of tools are JSON between `<tool_call>` and `</tool_call>`."""


def start_server(model: Path, folder: Path) -> Server:
    """A server on the CPU, ready to answer; it takes weights by shared memory and by pull, whose
    engine is the same."""
    settings = ServerSettings(
        max_model_len=1024, max_num_seqs=64, dtype="float32", kv_cache_gib=0.1, tool_parser=PARSER
    )
    server = Server(
        str(model), settings, "shared_memory", [], folder, 0, middleware=Pull.middleware
    )
    server.start()
    server.wait_ready()
    return server


def end_half_sync(url: str, token: str) -> None:
    """Ends the sync in whose middle a run has ended.

    The weights of a begun update are on no device, and the next response would end vLLM's engine;
    a paused server answers none. Answered with an error if there is nothing to end.
    """
    for path in ("/finish_weight_update", "/resume"):
        call(url, "POST", path, {"Authorization": f"Bearer {token}"}, b"{}")


def metric(server: Any, name: str) -> float:
    """A number of vLLM's own."""
    _, body = call(server.url, "GET", "/metrics", {"Authorization": f"Bearer {server.token}"})
    found = re.findall(rf"^vllm:{name}\{{.* (\S+)$", body.decode(), re.MULTILINE)
    return sum(map(float, found))


class LentServer:
    """A server that a run neither starts nor stops; see `server_elsewhere`, too."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)

    def start(self) -> None:
        """It runs already."""

    def wait_ready(self, interrupted: Callable[[], None] | None = None) -> None:
        """It is ready already."""

    def stop(self) -> None:
        """It keeps running."""


def server_elsewhere(url: str, token: str, settings: ServerSettings) -> LentServer:
    """The server of another program, whose processes are not ours to bind."""
    server = JoinedServer(0, Location(url), token, settings)
    vars(server).update(processes=list)
    return LentServer(server)


def borrow(url: str, token: str) -> None:
    """Has the strategies of this program, whichever they are, take the server of another."""

    def make_servers(strategy: Any, run: Run) -> list[Any]:
        end_half_sync(url, token)
        return [server_elsewhere(url, token, strategy.settings_of(run))]

    GeneratorDevices.make_servers = make_servers  # type: ignore[method-assign]


class Borrowing(lrl.AsyncSingleDevice):
    """The strategy with lent servers in the place of its own; with more than one, the last is for
    evaluation."""

    def __init__(self, *servers: LentServer, **settings: Any) -> None:
        super().__init__(
            generator_devices=len(servers), evaluation_generators=len(servers) - 1, **settings
        )
        self.lent = servers
        # Now: a run's teacher may be the server, and is asked before the run starts any.
        for server in servers:
            if server.url.startswith("http:"):  # the one with TLS has a single run
                end_half_sync(server.url, server.token)

    def make_servers(self, run: Run) -> list[Server]:
        """See `GeneratorDevices.make_servers`."""
        return list(self.lent)  # type: ignore[arg-type]
