"""A run with two trainer ranks and a real generator: what holds for one rank holds for two, through
two bad ends.

Covers lrl/strategies/several_ranks.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from lrl.strategies.several_ranks import RANK_TIMEOUT
from tests import program
from tests.leftovers import MARK, lives, words
from tests.lent_server import LentServer
from tests.strategies import run_of_ranks
from tests.strategies.forked_ranks import Fork, free_port, start_fork, torchruns_variables
from tests.strategies.run_of_ranks import GROUPS, told
from tests.strategies.test_shutdown import wait_for_step

RANKS, STEPS = 2, 10
"""One pass over the 40 prompts."""


@dataclass
class Runs:
    """The runs of a test, one after the other, whose output is in a file."""

    how: dict[str, Any]
    output: Path
    started: list[Any] = field(default_factory=list)

    def launch(self, **settings: Any) -> subprocess.Popen[str]:
        """Starts rank 0, which starts the other."""
        words = json.dumps(self.how | settings)
        self.started.append(program.start(run_of_ranks.__name__, self.output, words))
        return self.started[-1]

    def fork(self, **settings: Any) -> list[Fork]:
        """Starts both ranks, as torchrun does."""
        words, port = json.dumps(self.how | settings), free_port()
        places = [torchruns_variables(rank, RANKS, port) for rank in range(RANKS)]
        own = {name: os.environ[name] for name in (MARK, "TMPDIR")}
        forks = [start_fork(run_of_ranks.main, self.output, own | place, words) for place in places]
        self.started += [one.process for one in forks]
        return forks

    def finish(self, **settings: Any) -> None:
        """Resumes from the last checkpoint that was told of, and looks at all that was trained."""
        text = self.output.read_text()
        path = text.rpartition("--ckpt_path ")[2].split()[0]
        ranks = self.fork(ckpt_path=path, **settings)
        assert [rank.wait() for rank in ranks] == [0, 0], self.output.read_text()
        check_whole(told(text + self.output.read_text()))
        assert Path(self.how["folder"], "policy", "config.json").exists()


@pytest.fixture
def runs(policy_folder: Path, lent_server: LentServer, tmp_path: Path, mark: str) -> Iterator[Runs]:
    server = {"url": lent_server.url, "token": lent_server.token}
    how = {"model": str(policy_folder), "folder": str(tmp_path), "server": server, "ranks": RANKS}
    found = Runs(how, tmp_path / "output")
    yield found
    for one in found.started:
        one.kill()


def test_a_run_that_loses_a_rank_trains_every_prompt_once_and_the_same_policy_on_all_ranks(
    runs: Runs,
) -> None:
    """Its end comes from a callback of rank 0 alone, which ends all ranks."""
    how = {"strategy": "AsyncDDP", "ends_at": STEPS}
    process = runs.launch(**how)
    wait_for_step(process, 3, runs.output, RANKS)
    (other,) = ranks_of(process.pid)
    other.kill()
    assert process.wait(300) == 1
    said = "(Another rank|Rank 1) has ended or cannot be reached"
    assert re.search(said, runs.output.read_text())
    runs.finish(**how)


def test_a_sharded_run_is_whole_through_a_signal_and_a_resume(runs: Runs) -> None:
    how = {"strategy": "AsyncFSDP", "steps": STEPS}
    process = runs.launch(**how)
    wait_for_step(process, 3, runs.output, RANKS)
    (other,) = ranks_of(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 128 + signal.SIGTERM
    assert not lives(other)
    runs.finish(**how)


def check_whole(lines: list[dict[str, Any]]) -> None:
    # A step that was trained again counts as it was at last.
    last = {(line["rank"], line["step"]): line for line in lines}
    assert last.keys() == {(rank, step) for rank in range(RANKS) for step in range(1, STEPS + 1)}
    first, second = ([last[rank, step] for step in range(1, STEPS + 1)] for rank in range(RANKS))
    assert [line["weights"] for line in first] == [line["weights"] for line in second]
    assert len({line["weights"] for line in first}) == STEPS
    assert all(line["passes"] > 0 for line in last.values())
    assert [line["reads"] for line in first] == [line["reads"] for line in second]
    assert all("weights" in line["reads"] for line in second)
    assert "log-probs" in second[0]["reads"], "the first proof is by all ranks"
    prompts = [prompt for line in first for prompt in line["prompts"]]
    assert sorted(prompts) == list(range(STEPS * GROUPS))
    assert {lag for line in first for lag in line["lags"]} <= {0, 1}
    assert {line["timeout_s"] for line in last.values()} == {RANK_TIMEOUT.total_seconds()}, (
        "not that of the meeting"
    )


def ranks_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # another child may end while it is looked at
            found += [child] if run_of_ranks.__name__ in " ".join(words(child)) else []
    return found
