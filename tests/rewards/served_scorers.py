"""A pool whose scorers join over HTTP, as at rank 0, and scorers that are real processes of the
command."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lrl.members.registry import Kind
from lrl.rewards import RewardPool
from lrl.system.endpoint import Endpoint
from lrl.types import Prompt
from tests.members.served_workers import ServedMembers

HERE = Path(__file__).parent


class ServedPool(ServedMembers):
    """A pool, the server at which its scorers join, and the scorers that were started."""

    def __init__(self, pool: RewardPool, folder: Path, endpoint: Endpoint) -> None:
        super().__init__(Kind.SCORER, pool.remote, folder, endpoint)
        self.pool = pool

    def start_scorer(self, *words: str, path: Path = HERE, **how: Any) -> subprocess.Popen[str]:
        """Starts a scorer; see `ServedMembers.start`."""
        return self.start(*words, path=path, **how)

    def close(self) -> None:
        super().close()
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
