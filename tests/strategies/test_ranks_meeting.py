"""Before the ranks have met: none stays behind, and none is deaf."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import program
from tests.leftovers import nothing_left, wait_for
from tests.strategies import ranks_before_they_meet


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    yield from nothing_left(monkeypatch)


def run(policy: Path, folder: Path, strategy: str) -> subprocess.Popen[str]:
    with (folder / "output").open("w") as output:
        return program.start(
            ranks_before_they_meet.__name__, policy, folder, strategy, stdout=output, stderr=output
        )


def test_a_rank_ends_with_its_rank_0_and_at_a_signal_before_all_have_met(
    policy_folder: Path, tmp_path: Path, mark: str
) -> None:
    process = run(policy_folder, tmp_path, "AsyncDDP")
    wait_for(
        lambda: len(list(tmp_path.glob("*.waits"))) == 2, 400.0, "both ranks that wait for rank 0"
    )
    one, other = (psutil.Process(int(file.stem)) for file in tmp_path.glob("*.waits"))
    one.terminate()
    wait_for(
        lambda: one.status() == psutil.STATUS_ZOMBIE, 120.0, "the end of a rank that got SIGTERM"
    )
    assert other.status() != psutil.STATUS_ZOMBIE
    process.kill()
    process.wait(120)
    wait_for(lambda: not other.is_running(), 120.0, "the end of a rank whose rank 0 is gone")


def test_a_strategy_without_generators_is_refused_and_leaves_no_rank(
    policy_folder: Path, tmp_path: Path, mark: str
) -> None:
    assert run(policy_folder, tmp_path, "auto").wait(400) == 1
    message = (tmp_path / "output").read_text()
    assert message.count("trainer.strategy is DDPStrategy, which has no generators") == 1, message
    assert "GLOBAL_RANK: 1" not in message and "Traceback" not in message
