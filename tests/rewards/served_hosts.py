"""A pool whose hosts join over HTTP, as at rank 0, and hosts that are real processes of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lrl.generators.endpoint import Endpoint
from lrl.generators.token_server import TokenServer
from lrl.rewards import RewardPool
from lrl.rewards.host_route import route_of
from lrl.types import Prompt
from tests.leftovers import wait_for

TOKEN = "the-token-of-this-run"
START_S = 120.0
HERE = Path(__file__).parent


class ServedPool:
    """A pool, the server at which its hosts join, and the hosts that were started."""

    def __init__(self, pool: RewardPool, folder: Path, heartbeat_s: float, endpoint: Endpoint) -> None:
        self.pool, self.folder, pool.hosts.heartbeat_s = pool, folder, heartbeat_s
        self.server = TokenServer(endpoint, TOKEN, [route_of(pool.hosts)])
        self.ends = ExitStack()

    def start_host(
        self,
        *words: str,
        url: str = "",
        token: str = TOKEN,
        path: Path = HERE,
        prefix: Sequence[str] = (),
        without: str = "",
    ) -> subprocess.Popen[str]:
        """Starts `lrl score --join` with one worker, for this pool or the run at `url`.

        `path` has the rewards, and `without` is a variable that its machine does not have.
        """
        lrl = str(Path(sys.executable).with_name("lrl"))
        own = ["score", "--join", url or self.server.location().url, "--workers", "1", *words]
        environment = {name: value for name, value in os.environ.items() if name != without}
        process = subprocess.Popen(
            [*prefix, lrl, *own],
            env=environment | {"LRL_TOKEN": token, "PYTHONPATH": str(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )
        self.ends.callback(process.wait, 60)
        self.ends.callback(process.kill)
        return process

    def joined(self, count: int) -> None:
        """Waits until so many hosts are ready."""
        wait_for(lambda: len(self.pool.hosts.ready) == count, START_S, f"{count} reward hosts")

    def close(self) -> None:
        self.pool.hosts.end()
        self.ends.close()
        self.server.close()
        self.pool.close()


@contextmanager
def served(
    pool: RewardPool,
    folder: Path,
    *,
    heartbeat_s: float = 30.0,
    endpoint: Endpoint = Endpoint(),  # noqa: B008 (it cannot change)
    first: Prompt | None = None,
) -> Iterator[ServedPool]:
    """Starts the pool, with a trial on the prompt `first`, and its server."""
    pool.start(first)
    made = ServedPool(pool, folder, heartbeat_s, endpoint)
    try:
        yield made
    finally:
        made.close()
