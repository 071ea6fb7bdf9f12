"""A run with two trainer ranks and a real generator: what holds for one rank holds for two, through two bad ends."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from lrl.strategies.several_ranks import RANK_TIMEOUT
from tests import program
from tests.leftovers import nothing_left, wait_for, words
from tests.lent_server import LentServer
from tests.strategies import run_of_ranks
from tests.strategies.run_of_ranks import RANKS
from tests.strategies.test_shutdown import wait_for_step

STEPS, GROUPS = 10, 4
"""One pass over the 40 prompts."""
ENDLESS = 1000


@pytest.fixture
def mark(lent_server: LentServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from nothing_left(monkeypatch)


def run(
    policy: Path,
    server: LentServer,
    folder: Path,
    checkpoint: str = "",
    strategy: str = "AsyncDDP",
    steps: int = STEPS,
) -> subprocess.Popen[str]:
    arguments = policy, folder, steps, checkpoint, strategy, json.dumps({"url": server.url, "token": server.token})
    with (folder / "output").open("w") as errors:
        return program.start(run_of_ranks.__name__, *arguments, stdout=subprocess.PIPE, stderr=errors)


def resumes_from(folder: Path) -> str:
    """The checkpoint that the run named when it ended."""
    return (folder / "output").read_text().rpartition("--ckpt_path ")[2].split()[0]


def told(folder: Path) -> list[list[dict[str, Any]]]:
    """The lines of each rank, by step; a step that was trained again counts as it was at last."""
    files = [folder / f"rank-{rank}.jsonl" for rank in range(RANKS)]
    found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [list({line["step"]: line for line in lines}.values()) for lines in found]


def test_a_run_that_loses_a_rank_trains_every_prompt_once_and_the_same_policy_on_all_ranks(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end comes from a callback of rank 0 alone, which ends all ranks."""
    monkeypatch.setenv("STOP_AT", str(STEPS))
    process = run(policy_folder, lent_server, tmp_path, steps=ENDLESS)
    wait_for_all(process, tmp_path, 3)
    (other,) = ranks_of(process.pid)
    other.kill()
    assert process.wait(300) == 1
    assert "Another rank does not take part in the step any more" in (tmp_path / "output").read_text()

    process = run(policy_folder, lent_server, tmp_path, resumes_from(tmp_path), steps=ENDLESS)
    try:
        wait_for_step(process, STEPS, tmp_path)
        assert process.wait(300) == 0, (tmp_path / "output").read_text()
    finally:
        process.kill()
    check_whole(tmp_path)


def test_a_sharded_run_is_whole_through_a_signal_and_a_resume(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, mark: str
) -> None:
    process = run(policy_folder, lent_server, tmp_path, strategy="AsyncFSDP")
    wait_for_all(process, tmp_path, 3)
    (other,) = ranks_of(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 128 + signal.SIGTERM
    assert not other.is_running()
    assert "--ckpt_path" in (tmp_path / "output").read_text()
    process = run(policy_folder, lent_server, tmp_path, resumes_from(tmp_path), "AsyncFSDP")
    wait_for_step(process, STEPS, tmp_path)
    assert process.wait(300) == 0
    check_whole(tmp_path)


def wait_for_all(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Waits until every rank has written its line of a step: rank 0, which says so, may be the first."""
    wait_for_step(process, step, folder)
    files = [folder / f"rank-{rank}.jsonl" for rank in range(RANKS)]
    wait_for(lambda: all(f'{{"step": {step},' in file.read_text() for file in files), 300.0, "the lines of all ranks")


def check_whole(tmp_path: Path) -> None:
    """Checks that every prompt was trained once, within the bound on lag, and by ranks that hold the same policy."""
    first, second = told(tmp_path)
    assert [line["step"] for line in first] == [line["step"] for line in second] == list(range(1, STEPS + 1))
    assert [line["weights"] for line in first] == [line["weights"] for line in second]
    assert len({line["weights"] for line in first}) == STEPS
    assert all(line["passes"] > 0 for line in [*first, *second])
    assert [line["reads"] for line in first] == [line["reads"] for line in second]
    assert all({"weights", "log-probs"} <= set(line["reads"]) for line in second)
    assert sorted(prompt for line in first for prompt in line["prompts"]) == list(range(STEPS * GROUPS))
    lags = [lag for line in first for lag in line["lags"]]
    assert min(lags) >= 0 and max(lags) <= 1
    assert {line["timeout_s"] for line in [*first, *second]} == {RANK_TIMEOUT.total_seconds()}, (
        "not that of the meeting"
    )
    assert (tmp_path / "policy" / "config.json").exists()


def ranks_of(pid: int) -> list[psutil.Process]:
    """The ranks that a rank 0 has started."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # another child may end while it is looked at
            found += [child] if run_of_ranks.__name__ in " ".join(words(child)) else []
    return found
