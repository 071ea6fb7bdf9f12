"""Several ranks that sum gradients, and before they have met: real processes, no generators.

Covers lrl/system/ranks.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

import lrl
from lrl.strategies import several_ranks
from tests import program
from tests.leftovers import wait_for
from tests.strategies import run_of_ranks, step_of_ranks
from tests.strategies.forked_ranks import free_port, run_ranks, start_rank


def fit_alone(policy: str, folder: str) -> None:
    several_ranks.MEETING = timedelta(seconds=2)
    run_of_ranks.fit(policy, folder, ranks=2, steps=1)


def test_buckets_of_gradients_give_the_sums_of_each(tmp_path: Path) -> None:
    """A rank without gradients counts as zero; what no rank has stays without."""
    run_ranks(step_of_ranks.sums, 2, tmp_path, tmp_path)
    for number in range(2):
        rank = torch.load(tmp_path / f"{number}.pt")
        first, *found = rank["found"]
        assert first is None and all(one.abs().max() > 0 for one in found[1:])
        assert all(torch.equal(*pair) for pair in zip(found, rank["each"][1:], strict=True))


def test_a_rank_that_never_comes_ends_the_run_and_is_named(
    policy_folder: Path, tmp_path: Path
) -> None:
    rank = start_rank(fit_alone, 0, 2, free_port(), tmp_path, str(policy_folder), str(tmp_path))
    status, said = rank.wait(), rank.printed()
    assert status == 1, said
    assert "Rank 0 has not met all 2 ranks within 0:00:02 (Timed out" in said
    assert "1/2 clients joined" in said and "Look for another rank's error" in said


def test_the_command_lines_defaults_of_torchs_wrapper_are_taken() -> None:
    lrl.AsyncDDP(model_averaging_period=None, find_unused_parameters=False, bucket_cap_mb=None)


def run(policy: Path, folder: Path, strategy: str, ranks: int) -> subprocess.Popen[str]:
    how = {"model": str(policy), "folder": str(folder), "strategy": strategy, "ranks": ranks}
    return program.start(run_of_ranks.__name__, folder / "output", json.dumps(how))


def test_a_rank_ends_with_its_rank_0_and_at_a_signal_before_all_have_met(
    policy_folder: Path, tmp_path: Path, mark: str
) -> None:
    process = run(policy_folder, tmp_path, "StandsStill", 3)

    def waiting() -> list[str]:
        return re.findall(r"waits for rank 0: (\d+)", (tmp_path / "output").read_text())

    wait_for(lambda: len(waiting()) == 2, 400.0, "both ranks that wait for rank 0")
    one, other = (psutil.Process(int(pid)) for pid in waiting())
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
    assert run(policy_folder, tmp_path, "auto", 1).wait(400) == 1
    message = (tmp_path / "output").read_text()
    assert message.count("trainer.strategy is DDPStrategy, which has no generators") == 1, message
    assert "GLOBAL_RANK: 1" not in message and "Traceback" not in message
    assert "is a rank of another process: False" in message, (
        "its next run would wait for ranks that nobody starts"
    )


def test_a_program_in_no_file_is_refused_as_no_other_rank_could_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["-c"])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    several_ranks.check_program(1)
    with pytest.raises(lrl.errors.ConfigError, match="'-c' is no file: write it to a file"):
        several_ranks.check_program(2)
