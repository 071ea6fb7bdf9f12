"""No process outlives its run, and nothing of it stays in /dev/shm, whichever way it ends. Each end is a whole run.

The good end is a script of the README (`tests/runs/test_readme.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lrl.generators.supervisor import SHM
from tests import program
from tests.leftovers import living, nothing_left, prefixes, wait_for
from tests.strategies import run_that_ends


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from nothing_left(monkeypatch)


def run(policy: Path, folder: Path, fail_at: int = -1) -> subprocess.Popen[str]:
    with (folder / "output").open("w") as errors:
        return program.start(run_that_ends.__name__, policy, folder, fail_at, stdout=subprocess.PIPE, stderr=errors)


def wait_for_step(process: subprocess.Popen[str], step: int, folder: Path) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == f"step {step}":
            return
    pytest.fail(f"the run ended before step {step}:\n{(folder / 'output').read_text()[-4000:]}")


def weights_in_shared_memory(mark: str) -> list[str]:
    return [name for name in os.listdir(SHM) if name.startswith(prefixes(living(mark)))]


def test_a_run_whose_module_fails_leaves_nothing_and_says_why(policy_folder: Path, tmp_path: Path, mark: str) -> None:
    process = run(policy_folder, tmp_path, fail_at=2)
    wait_for_step(process, 2, tmp_path)
    assert process.wait(400) == 1
    assert "RuntimeError: the module fails" in (tmp_path / "output").read_text()


# SIGTERM goes the way of SIGINT; runs with several ranks get it (`test_ranks_run.py`).
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_run_ended_by_a_signal_leaves_nothing(
    policy_folder: Path, tmp_path: Path, mark: str, signum: signal.Signals
) -> None:
    process = run(policy_folder, tmp_path)
    wait_for_step(process, 2, tmp_path)
    assert len(living(mark)) >= 5, "trainer, reward worker, supervisor, API server, engine"
    assert weights_in_shared_memory(mark)
    process.send_signal(signum)
    status = process.wait(400)
    if signum == signal.SIGKILL:
        return
    assert status == 128 + signum
    path = next((tmp_path / "checkpoints").glob("*"))
    assert (tmp_path / "output").read_text().splitlines()[-1].endswith(f"Resume with --ckpt_path {path}")
    assert torch.load(path, weights_only=True)["global_step"] >= 2


# SIGKILL is in `tests/generators/test_ends.py`.
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]])
def test_a_run_ended_by_a_signal_while_its_server_starts_leaves_nothing(
    policy_folder: Path, tmp_path: Path, mark: str, signals: list[signal.Signals]
) -> None:
    process = run(policy_folder, tmp_path)
    wait_for(lambda: list(tmp_path.glob("generator-0.log")), 300.0, "the server's log")
    wait_for(lambda: len(living(mark)) >= 3, 300.0, "trainer, supervisor and API server")
    process.send_signal(signals[0])
    if len(signals) > 1:
        wait_for(lambda: "A second signal" in (tmp_path / "output").read_text(), 300.0, "the word on the first signal")
        process.send_signal(signals[1])
    told_once = signals == [signal.SIGTERM]
    assert process.wait(400) == (128 + signal.SIGTERM if told_once else -signals[-1])
    assert not list(tmp_path.glob("**/*.ckpt"))
