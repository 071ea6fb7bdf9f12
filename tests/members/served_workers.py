"""Members with workers that join over HTTP, as at rank 0, and are real processes of the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lrl.generators.settings import ServerSettings
from lrl.members.admission import WorkerAdmission, poll_forever
from lrl.members.registry import JoinSpec, Kind, Registry
from lrl.members.service import RegistryServer
from lrl.system.endpoint import Endpoint
from lrl.system.event_loop import LoopThread
from lrl.system.remote_workers import RemotePool
from tests.leftovers import wait_for

TOKEN = "the-token-of-this-run"
START_S = 120.0


class Joinable:
    """Admits members to a pool, from its making to `close`."""

    def __init__(self, kind: Kind, remote: RemotePool[Any], endpoint: Endpoint) -> None:
        self.kind = kind
        self.remote = remote
        settings = ServerSettings(**vars(endpoint))
        spec = JoinSpec("base", asdict(settings), "pull", run_id="ab12", on_cpu=True, generators=0)
        self.registry = Registry(spec)
        self.server = RegistryServer(self.registry, endpoint, TOKEN, terms={kind: remote.terms})
        self._loop = LoopThread()
        self._loop.submit(poll_forever(WorkerAdmission(kind, remote, self.registry, TOKEN).poll))

    def close(self) -> None:
        self.registry.end()
        self._loop.close()
        self.server.close()


class ServedMembers(Joinable):
    """A pool, the server at which its members join, and the members that were started."""

    def __init__(
        self, kind: Kind, remote: RemotePool[Any], folder: Path, endpoint: Endpoint
    ) -> None:
        super().__init__(kind, remote, endpoint)
        self.folder = folder
        self.ends = ExitStack()

    def start(
        self,
        *words: str,
        path: Path,
        url: str = "",
        token: str = TOKEN,
        prefix: Sequence[str] = (),
        without: str = "",
    ) -> subprocess.Popen[str]:
        """Starts `lrl join` with one worker, for this pool or the run at `url`.

        `path` has what the workers import, and `without` is a variable that its machine does not
        have.
        """
        lrl = str(Path(sys.executable).with_name("lrl"))
        address = url or self.server.location().url
        own = ["join", address, "--kind", str(self.kind), "--workers", "1", *words]
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
        """Waits until so many members get work."""
        wait_for(lambda: len(self.remote.ready) == count, START_S, f"{count} {self.kind}s")

    @property
    def refusal(self) -> str:
        return self.registry.refusal(self.kind)

    def close(self) -> None:
        super().close()
        self.ends.close()
