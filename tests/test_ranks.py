"""Several ranks that train a step together: real processes, real collectives, no generators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import lrl
from tests.gradient_of_ranks import BUDGET, GROUPS
from tests.test_ends_of_a_run import ROOT
from tests.test_policy import gradient, opened, pack


def start(policy: Path, results: Path, ranks: int) -> list[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "tests.gradient_of_ranks", str(policy), str(results)]
    how: Any = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen([*words, str(rank), str(ranks)], **how) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_gradient_does_not_depend_on_the_number_of_ranks(policy_folder: Path, tmp_path: Path, ranks: int) -> None:
    processes = start(policy_folder, tmp_path, ranks)
    assert [process.wait(120) for process in processes] == [0] * ranks
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    alone = gradient(opened(str(policy_folder)), pack(GROUPS, BUDGET))
    assert alone.abs().max() > 0.01
    for rank in found:
        torch.testing.assert_close(rank["gradient"], alone, atol=1e-6, rtol=1e-4)
        assert rank["passes"] > 1 and rank["sequences"] == sum(len(group.rollouts) for group in GROUPS)


def test_no_rank_outlives_rank_0(policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOW", "60")
    first, second = start(policy_folder, tmp_path, 2)
    assert second.stdout is not None
    while second.stdout.readline() != "trains\n":
        assert second.poll() is None
    first.kill()
    said, _ = second.communicate(timeout=30)
    assert second.returncode == 1 and "Rank 0 does not take part in the step any more" in said


@pytest.mark.parametrize("name, value", [("model_averaging_period", 2), ("static_graph", True)])
def test_a_setting_of_torchs_wrapper_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"strategy.{name} is {value}.*Leave it out"):
        lrl.AsyncDDP(**{name: value})


def test_what_the_command_line_gives_to_torchs_wrapper_by_itself_is_not_refused() -> None:
    assert lrl.AsyncDDP(model_averaging_period=None, find_unused_parameters=False, bucket_cap_mb=None)
