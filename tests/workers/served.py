"""Members with workers that join over HTTP, as at rank 0, and are real processes of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lrl.generators.settings import ServerSettings
from lrl.members.registry import JoinSpec, Kind, Registry, RegistryServer
from lrl.members.run_members import WorkerAdmission, poll_forever
from lrl.system.endpoint import Endpoint
from lrl.system.event_loop import LoopThread
from lrl.workers.pool import Members
from tests.leftovers import wait_for
from tests.workers.jobs import REWARDS, Jobs

TOKEN = "the-token-of-this-run"
START_S = 120.0
PATH = os.pathsep.join([str(Path(__file__).parents[2]), str(REWARDS)])


class Joinable:
    """Admits members to the pools of these jobs, from its making to `close`."""

    def __init__(self, *jobs: Jobs, endpoint: Endpoint = Endpoint()) -> None:  # noqa: B008
        self.members = Members(*(each.pool.workers for each in jobs))
        settings = ServerSettings(**vars(endpoint))
        spec = JoinSpec("base", asdict(settings), "pull", run_id="ab12", on_cpu=True, generators=0)
        self.registry = Registry(spec, self.members.terms)
        self.server = RegistryServer(self.registry, endpoint, TOKEN)
        self._loop = LoopThread()
        self._loop.submit(poll_forever(WorkerAdmission(self.members, self.registry, TOKEN).poll))

    def close(self) -> None:
        self.registry.end()
        self._loop.close()
        self.server.close()


class ServedMembers(Joinable):
    """The server at which members join, and the members that were started."""

    def __init__(self, folder: Path, *jobs: Jobs, **how: Any) -> None:
        super().__init__(*jobs, **how)
        self.folder = folder
        self.ends = ExitStack()

    def start(
        self,
        *,
        path: str = PATH,
        url: str = "",
        prefix: Sequence[str] = (),
        without: str = "",
    ) -> subprocess.Popen[str]:
        """Starts `lrl join` with one worker, for these pools or the run at `url`.

        `path` has what the workers import, and `without` is a variable that its machine does not
        have.
        """
        lrl = str(Path(sys.executable).with_name("lrl"))
        address = url or self.server.location().url
        own = ["join", address, "--kind", "worker", "--workers", "1"]
        environment = {name: value for name, value in os.environ.items() if name != without}
        process = subprocess.Popen(
            [*prefix, lrl, *own],
            env=environment | {"LRL_TOKEN": TOKEN, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )
        self.ends.callback(process.wait, 60)
        self.ends.callback(process.kill)
        return process

    def joined(self, count: int) -> None:
        """Waits until so many members get work."""
        wait_for(lambda: len(self.members.ready) == count, START_S, f"{count} workers")

    @property
    def refusal(self) -> str:
        return "".join(each.why for each in self.registry.members(Kind.WORKER))

    def close(self) -> None:
        super().close()
        self.ends.close()


@contextmanager
def served(folder: Path, *jobs: Jobs, **how: Any) -> Iterator[ServedMembers]:
    """Starts the jobs' workers on this machine, and the server at which others join."""
    for each in jobs:
        each.pool.start()
    made = ServedMembers(folder, *jobs, **how)
    try:
        yield made
    finally:
        made.close()
        for each in jobs:
            each.pool.close()
