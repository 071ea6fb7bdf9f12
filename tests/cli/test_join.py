"""`lrl join` and `lrl leave`: what they say when they cannot do what was asked; `lrl prompt`."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from lrl.cli.main import main
from lrl.errors import NotRunning
from lrl.generators.settings import ServerSettings
from lrl.members import join
from lrl.members.find_run import find_generator
from lrl.members.registry import Kind
from tests.cli.conftest import Say
from tests.generators.model_fleet import Scripted
from tests.http_call import call
from tests.lent_server import LentServer

WORKER = ["--kind", "worker"]


def test_a_member_has_a_worker_for_each_core_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[str, Kind, int]] = []

    def note(run: str, kind: Kind, *, workers: int, **own: object) -> int:
        found.append((run, kind, workers))
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


def variables(lines: str) -> tuple[str, str]:
    """What a shell has of the printed lines: URL and key."""
    shown = f"{lines}\nprintenv OPENAI_BASE_URL OPENAI_API_KEY"
    url, key = subprocess.check_output(["bash"], input=shown, text=True).split()
    return url, key


def test_a_live_policy_answers_at_the_printed_address_and_its_token_is_in_no_file(
    lent_server: LentServer, say: Say
) -> None:
    run = lent_server.log_path.parent
    status, lines, _ = say("prompt", run)
    url, key = variables(lines)
    assert status == 0 and (url, key) == (f"{lent_server.url}/v1", lent_server.token)
    assert call(lent_server.url, "GET", "/v1/models", {"Authorization": f"Bearer {key}"})[0] == 200
    files = [path for path in run.rglob("*") if path.is_file()]
    assert files and not any(key.encode() in path.read_bytes() for path in files)


def test_a_generator_is_found_by_number_under_any_name_of_its_run_until_its_process_ends(
    tmp_path: Path, say: Say
) -> None:
    first, second = (
        Scripted("base", ServerSettings(), "shared_memory", [], tmp_path, number)
        for number in (0, 12)
    )
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    try:
        for words, server in (((), first), (("--generator", "12"), second)):
            server.start()
            assert variables(say("prompt", link, *words)[1])[0] == f"{server.url}/v1"
        found = find_generator(link, 12)
        assert found.token == second.token and found.token not in repr(found)
    finally:
        first.stop()
        second.stop()
    with pytest.raises(NotRunning, match=r"of \[\]"):
        find_generator(link, 12)
