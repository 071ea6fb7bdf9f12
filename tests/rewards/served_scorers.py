"""A pool whose scorers join over HTTP, as at rank 0, and scorers that are real processes of the
command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from lrl.generators.settings import ServerSettings
from lrl.members.admission import poll_forever
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind
from lrl.members.registry import Registry
from lrl.members.service import RegistryServer
from lrl.members.worker_admission import WorkerAdmission
from lrl.rewards import RewardPool
from lrl.system.endpoint import Endpoint
from lrl.system.event_loop import LoopThread
from lrl.types import Prompt
from tests.leftovers import wait_for

TOKEN = "the-token-of-this-run"
START_S = 120.0
HERE = Path(__file__).parent


class JoinablePool:
    """Admits the scorers of a pool, from its making to `close`."""

    def __init__(self, pool: RewardPool, endpoint: Endpoint) -> None:
        settings = ServerSettings(**vars(endpoint))
        spec = JoinSpec("base", asdict(settings), "pull", run_id="ab12", on_cpu=True, generators=0)
        self.registry = Registry(spec)
        terms = {Kind.SCORER: pool.remote.terms}
        self.server = RegistryServer(self.registry, endpoint, TOKEN, terms=terms)
        self._loop = LoopThread()
        admission = WorkerAdmission(Kind.SCORER, pool.remote, self.registry, TOKEN)
        self._loop.submit(poll_forever(admission))

    def close(self) -> None:
        self.registry.end()
        self._loop.close()
        self.server.close()


class ServedPool(JoinablePool):
    """A pool, the server at which its scorers join, and the scorers that were started."""

    def __init__(self, pool: RewardPool, folder: Path, endpoint: Endpoint) -> None:
        super().__init__(pool, endpoint)
        self.pool = pool
        self.folder = folder
        self.ends = ExitStack()

    def start_scorer(
        self,
        *words: str,
        url: str = "",
        token: str = TOKEN,
        path: Path = HERE,
        prefix: Sequence[str] = (),
        without: str = "",
    ) -> subprocess.Popen[str]:
        """Starts `lrl join --kind scorer` with one worker, for this pool or the run at `url`.

        `path` has the rewards, and `without` is a variable that its machine does not have.
        """
        lrl = str(Path(sys.executable).with_name("lrl"))
        own = [
            "join",
            url or self.server.location().url,
            "--kind",
            "scorer",
            "--workers",
            "1",
            *words,
        ]
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
        """Waits until so many scorers get jobs."""
        wait_for(lambda: len(self.pool.remote.ready) == count, START_S, f"{count} scorers")

    @property
    def refusal(self) -> str:
        return self.registry.refusal(Kind.SCORER)

    def close(self) -> None:
        super().close()
        self.ends.close()
        self.pool.close()


@contextmanager
def served(
    pool: RewardPool,
    folder: Path,
    *,
    endpoint: Endpoint = Endpoint(),  # noqa: B008 (it cannot change)
    first: Prompt | None = None,
) -> Iterator[ServedPool]:
    """Starts the pool, with a trial on the prompt `first`, and its server."""
    pool.start(first)
    made = ServedPool(pool, folder, endpoint)
    try:
        yield made
    finally:
        made.close()
