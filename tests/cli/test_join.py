"""`lrl join` and `lrl leave`: what they say when they cannot do what was asked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lrl.cli.main import main
from lrl.members import join
from lrl.members.join import LocalOverrides
from lrl.members.registry import Kind
from tests.cli.conftest import Say

WORKER = ["--kind", "worker"]


def test_a_member_has_a_worker_for_each_core_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[str, Kind, int]] = []

    def note(run: str, kind: Kind, own: LocalOverrides) -> int:
        found.append((run, kind, own.workers))
        return 0

    monkeypatch.setattr(join, "join", note)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert main(["join", "RUN", *WORKER]) == 0
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")
    assert main(["join", "RUN", *WORKER]) == 0
    assert found == [("RUN", Kind.WORKER, len(os.sched_getaffinity(0))), ("RUN", Kind.WORKER, 7)]


@pytest.mark.parametrize("words", [["join"], ["join", *WORKER], ["leave"]])
def test_a_folder_without_a_live_run_or_an_address_where_nobody_answers_is_named(
    words: list[str], tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, error = say(*words, tmp_path)
    assert status == 2 and f"{tmp_path} is not the folder of a live run" in error
    monkeypatch.setenv("LRL_TOKEN", "a-token-of-a-run-that-is-over")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        status, _, error = say(*words, f"http://127.0.0.1:{free.getsockname()[1]}")
    assert status == 2 and "The run does not answer at http://127.0.0.1" in error
