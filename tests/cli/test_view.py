"""`lrl view`: what it refuses, what it prints, and its page in a real browser."""

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
from tests import chromium
from tests.certificates import self_signed
from tests.cli.conftest import Say
from tests.http_call import call
from tests.viewer.made_run import branched, episode, lines, rollout

HOSTILE = "<script>document.title = 'taken'</script>\u202e"
PLACES = """[...document.querySelectorAll(".tree circle")].map(
    (one) => [one.cx.baseVal.value, one.cy.baseVal.value])"""
"""Of the dots of the tree: the prompt, and its turns."""
COMMAND = "import sys; from lrl.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 600 groups."""
    folder = tmp_path_factory.mktemp("run")
    text = "".join(lines(step, step, [rollout("12", step % 2)]) for step in range(599))
    append(folder / "rollouts.jsonl", text)
    group = [episode("6*7", "=42", HOSTILE), rollout("7", None, failure="timeout: 9 s")]
    append(folder / "rollouts.jsonl", lines(599, 599, group, HOSTILE))
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


def test_a_folder_without_rollouts_is_refused_with_the_remedy(
    tmp_path: Path, run: Path, say: Say
) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    for words, told in {
        (str(tmp_path),): "trainer.callbacks has lrl.callbacks.RolloutFile",
        (str(run.parent),): f"The newest in it is {run}",
        (str(run), "--port", str(port)): f"--port is {port}, which cannot be had at --host",
        (str(run), "--host", "0.0.0.0"): "--host is '0.0.0.0', which other machines may reach",
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


@pytest.mark.skipif(not chromium.is_installed(), reason="there is no chromium")
def test_a_browser_shows_a_response_as_text_and_only_the_rows_in_sight(run: Path) -> None:
    with viewed(run) as (address, _), chromium.page() as page:
        page.open(address, 1200, 700)
        page.wait("document.querySelector('.row') && true")
        assert run.name in page.run("document.title")
        assert "token" not in page.run("location.href")
        assert page.run("document.querySelectorAll('.row').length") < 60
        page.wait("document.querySelector('.row.chosen')?.textContent.includes('step 599 ')")
        page.wait("document.querySelectorAll('.response').length == 2")
        page.run("document.getElementById('list').scrollTop = 1e6")
        page.wait("document.querySelector('.row:last-child')?.textContent.includes('step 0 ')")
        page.run("document.getElementById('list').scrollTop = 0")
        page.wait("document.querySelector('.row')?.textContent.includes('step 599 ')")
        page.run("document.querySelector('.row').click()")
        page.wait("document.querySelectorAll('.response').length == 2")
        shown = page.run("document.getElementById('group').textContent")
        assert "<script>document.title" in shown and "⟦202E⟧" in shown and "\u202e" not in shown
        assert "timeout: 9 s" in shown and "environment" in shown and "turn 2" in shown
        assert run.name in page.run("document.title")
        colours = "new Set([...document.querySelectorAll('[data-token]')].map((one) => one.style.background)).size"
        for colour, least in {"version": 2, "log-prob": 2, "mask": 2, "none": 1}.items():
            choose = f"choice.value = '{colour}', choice.onchange()"
            page.run(f"{{ const choice = document.querySelector('.head select'); {choose} }}")
            assert page.run(colours) == least, colour
        append(run / "rollouts.jsonl", lines(600, 600, [branched()]))
        page.wait("document.getElementById('total').textContent == '601 groups'")
        page.run("document.querySelector('.row').click()")
        page.wait("document.querySelectorAll('.response').length == 1")
        branch = page.run("document.querySelector('.branch').textContent")
        assert branch == "branch, after what the environment wrote behind turn 1"
        assert page.run(PLACES) == [[12, 12], [36, 12], [60, 12], [60, 36]]
        page.run("document.querySelectorAll('.tree circle')[3].onclick()")
        assert page.run("document.querySelector('.aimed').textContent") == "or 41"
        for words, found in {"failure=timeout": 1, "": 601, "finish_reason=stop": 601}.items():
            page.run(f"filters.elements.end.value = '{words}'; filters.oninput()")
            page.wait(f"document.getElementById('total').textContent == '{found} groups'")
