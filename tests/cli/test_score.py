"""`lrl score --join`: what it says when it cannot score."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lrl.cli import score
from lrl.cli.main import main

SCORE = ["score", "--join"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["score"], "--join"),
        ([*SCORE, "somewhere", "--workers", "0"], "--workers 0: it must be at least 1"),
        ([*SCORE, "somewhere", "--number", "-1"], "--number -1: reward hosts are counted from 0"),
        ([*SCORE, "somewhere", "--run_cert", "cert.pem"], "only with the run's address"),
        ([*SCORE, __file__], "is a file; give the run's folder"),
    ],
)
def test_words_that_cannot_work_are_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2 and named in capsys.readouterr().err


def test_a_host_has_a_worker_for_each_core_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert score.make_parser().parse_args(["--join", "RUN"]).workers == len(os.sched_getaffinity(0))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")
    assert score.make_parser().parse_args(["--join", "RUN"]).workers == 7


def test_without_a_live_run_the_error_names_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SCORE, str(tmp_path)]) == 2
    assert f"{tmp_path} is not the folder of a live run" in capsys.readouterr().err


def test_an_address_where_nobody_answers_is_named_with_the_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRL_TOKEN", "a-token-of-a-run-that-is-over")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert main([*SCORE, f"http://127.0.0.1:{free.getsockname()[1]}"]) == 2
    said = capsys.readouterr().err
    assert "The run does not answer at http://127.0.0.1" in said and "strategy.server.host" in said
