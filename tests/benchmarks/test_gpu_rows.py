"""The rows of one GPU, as far as they go without one: the processes of a row, and arithmetic."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu import collectives, link_rows, rows, two_processes
from benchmarks.gpu.row_processes import Row, run_row
from benchmarks.gpu.step_of_ranks import Expected
from benchmarks.records import read


def answer_of(parts: Sequence[str], limit_s: float = 60.0) -> dict[str, Any]:
    """The answer of a row whose processes run these lines of Python."""
    row = Row([link_rows.send] * len(parts))
    return run_row("row", row, lambda number, port: [sys.executable, "-c", parts[number]], limit_s)


def test_a_row_whose_process_fails_is_answered_at_once() -> None:
    answer = answer_of(["import time; time.sleep(600)", "print('NCCL WARN no'); exit(3)"])
    assert not answer["works"] and answer["error"] == "part 1 ended with status 3"
    assert answer["said"] == ["NCCL WARN no"] and answer["row_s"] < 60


def test_a_row_that_hangs_is_answered_at_its_limit_and_leaves_no_process(tmp_path: Path) -> None:
    hang = (
        "import pathlib, subprocess, sys, time;"
        "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(tmp_path)!r}, str(own.pid)).touch();"
        "time.sleep(600)"
    )
    answer = answer_of([hang, hang], limit_s=3.0)
    assert not answer["works"] and "no part has begun" in answer["error"]
    started = [int(one.name) for one in tmp_path.iterdir()]
    left = [psutil.Process(pid) for pid in started if psutil.pid_exists(pid)]
    assert len(started) == 2 and not psutil.wait_procs(left, timeout=30)[1]


def test_a_process_that_the_row_kills_is_no_failure() -> None:
    assert answer_of(["pass", "import os; os.kill(os.getpid(), 9)"])["works"]


def test_a_fact_that_is_not_so_is_kept_and_fails_its_row(tmp_path: Path) -> None:
    lines = rows.Lines()
    lines.out, lines.about = tmp_path / "out.jsonl", {"row": "row"}
    with pytest.raises(RuntimeError, match="not so: same"):
        lines.confirm(same=False, other=True)
    assert read(lines.out)[0]["same"] is False


def test_how_far_passes_are_off_is_a_share_of_what_is_expected() -> None:
    expected = Expected(2.0, 4.0, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    off = expected.off(2.2, 3.0, {"a": torch.tensor([3.0]), "b": torch.tensor([4.5])})
    wanted = {"loss_off": 0.1, "norm_off": 0.25, "gradient_off": 0.1}
    assert all(math.isclose(off[name], value, rel_tol=1e-6) for name, value in wanted.items())


def test_an_error_of_nccl_is_told_with_its_last_line() -> None:
    error = RuntimeError("NCCL error in: x.cpp:1\nncclInvalidUsage: no.\nDuplicate GPU detected\n")
    said = rows.first_lines(error)
    assert said == "RuntimeError: NCCL error in: x.cpp:1 ... Duplicate GPU detected"
    assert rows.first_lines(ValueError("one\ntwo")) == "ValueError: one"


def test_without_a_gpu_the_programs_end_with_an_error_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for program in (collectives, two_processes):
        with pytest.raises(SystemExit, match="2"):
            program.main(["--folder", str(tmp_path / "a"), "--out", str(tmp_path / "b")])
        assert "sees no CUDA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
