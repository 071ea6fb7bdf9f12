"""`lrl view`: what it refuses, and the address that it prints."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lrl.viewer.rollout_file import append
from tests.certificates import self_signed
from tests.cli.conftest import Say
from tests.http_call import call
from tests.viewer.made_run import lines, rollout

COMMAND = "import sys; from lrl.cli.main import main; sys.exit(main())"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of one group."""
    folder = tmp_path / "run"
    folder.mkdir()
    append(folder / "rollouts.jsonl", lines(0, 0, [rollout("12")]))
    return folder


@contextmanager
def viewed(run: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that the command prints, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "view", str(run), *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        yield next(found[0] for line in lines if (found := re.search(r"http\S+", line))), process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()


def test_a_folder_without_rollouts_is_refused_with_the_remedy(run: Path, say: Say) -> None:
    (run / "none").mkdir()
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    for words, told in {
        (run / "none",): "trainer.callbacks has lrl.callbacks.RolloutFile",
        (run.parent,): f"The newest in it is {run}",
        (run, "--port", port): f"--port is {port}, which cannot be had at --host",
        (run, "--host", "0.0.0.0"): "--host is '0.0.0.0', which other machines may reach",
    }.items():
        status, _, message = say("view", *words)
        assert status == 2 and message.startswith("lrl: error: ") and told in message, message
        assert message.count("\n") == 1 and "strategy" not in message
    taken.close()


def test_the_printed_address_has_a_token_of_its_own_and_ctrl_c_ends_it(run: Path) -> None:
    with viewed(run) as (address, process):
        url, token = address.split("/#token=")
        assert url.startswith("http://127.0.0.1:") and len(token) > 40
        assert call(url, "GET", "/api/run", {})[0] == 401
        assert call(url, "GET", "/api/run", {"Authorization": f"Bearer {token}"})[0] == 200
    assert process.returncode == 0


def test_other_machines_read_it_over_tls(run: Path, tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    words = ["--host", "0.0.0.0", "--tls_cert", cert, "--tls_key", key]
    with viewed(run, *words) as (address, _):
        assert address.startswith(f"https://{socket.gethostname()}:")
