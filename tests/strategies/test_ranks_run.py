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
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lrl.strategies.several_ranks import RANK_TIMEOUT
from tests import program
from tests.leftovers import lives, wait_for, words
from tests.lent_server import LentServer
from tests.strategies import run_of_ranks
from tests.strategies.run_of_ranks import RANKS
from tests.strategies.test_shutdown import wait_for_step

STEPS, GROUPS = 10, 4
"""One pass over the 40 prompts."""
ENDLESS = 1000


@pytest.fixture
def start(
    policy_folder: Path, lent_server: LentServer, tmp_path: Path, mark: str
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the program, whose rank 0 starts the other."""
    started = []

    def start(
        strategy: str, checkpoint: str = "", steps: int = STEPS, **variables: str
    ) -> subprocess.Popen[str]:
        where = json.dumps({"url": lent_server.url, "token": lent_server.token})
        how = (str(policy_folder), str(tmp_path), str(steps), checkpoint, strategy, where)
        with (tmp_path / "output").open("w") as output:
            environment = {**os.environ, **variables}
            process = program.start(
                run_of_ranks.__name__, *how, stdout=output, stderr=output, env=environment
            )
        started.append(process)
        return process

    yield start
    for one in started:
        one.kill()


def resumes_from(output: Path) -> str:
    return output.read_text().rpartition("--ckpt_path ")[2].split()[0]


def told(folder: Path) -> list[list[dict[str, Any]]]:
    """The lines of each rank, by step; a step that was trained again counts as it was at last."""
    files = [folder / f"rank-{rank}.jsonl" for rank in range(RANKS)]
    found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [list({line["step"]: line for line in lines}.values()) for lines in found]


def test_a_run_that_loses_a_rank_trains_every_prompt_once_and_the_same_policy_on_all_ranks(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Its end comes from a callback of rank 0 alone, which ends all ranks."""
    output = tmp_path / "output"
    process = start("AsyncDDP", "", ENDLESS, STOP_AT=str(STEPS))
    wait_for_all(process, output, 3)
    (other,) = ranks_of(process.pid)
    other.kill()
    assert process.wait(300) == 1
    assert re.search("(Another rank|Rank 1) has ended or cannot be reached", output.read_text())

    process = start("AsyncDDP", resumes_from(output), ENDLESS, STOP_AT=str(STEPS))
    assert process.wait(300) == 0, output.read_text()
    check_whole(tmp_path)


def test_a_sharded_run_is_whole_through_a_signal_and_a_resume(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    output = tmp_path / "output"
    process = start("AsyncFSDP")
    wait_for_all(process, output, 3)
    (other,) = ranks_of(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 128 + signal.SIGTERM
    assert not lives(other)
    assert "--ckpt_path" in output.read_text()
    process = start("AsyncFSDP", resumes_from(output))
    assert process.wait(300) == 0, output.read_text()
    check_whole(tmp_path)


def wait_for_all(process: subprocess.Popen[str], output: Path, step: int) -> None:
    """Waits until every rank has written its line of a step: rank 0, which says so, may be the
    first."""
    wait_for_step(process, step, output)
    files = [output.parent / f"rank-{rank}.jsonl" for rank in range(RANKS)]
    wait_for(
        lambda: all(f'{{"step": {step},' in file.read_text() for file in files),
        300.0,
        "the lines of all ranks",
    )


def check_whole(tmp_path: Path) -> None:
    first, second = told(tmp_path)
    for lines in (first, second):
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["weights"] for line in first] == [line["weights"] for line in second]
    assert len({line["weights"] for line in first}) == STEPS
    assert all(line["passes"] > 0 for line in [*first, *second])
    assert [line["reads"] for line in first] == [line["reads"] for line in second]
    assert all("weights" in line["reads"] for line in second)
    assert "log-probs" in second[0]["reads"], "the first proof is by all ranks"
    assert sorted(prompt for line in first for prompt in line["prompts"]) == list(
        range(STEPS * GROUPS)
    )
    lags = [lag for line in first for lag in line["lags"]]
    assert min(lags) >= 0 and max(lags) <= 1
    assert {line["timeout_s"] for line in [*first, *second]} == {RANK_TIMEOUT.total_seconds()}, (
        "not that of the meeting"
    )
    assert (tmp_path / "policy" / "config.json").exists()


def ranks_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # another child may end while it is looked at
            found += [child] if run_of_ranks.__name__ in " ".join(words(child)) else []
    return found
