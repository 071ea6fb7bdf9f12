"""`lrl prompt`: the printed lines, run by a real shell, against a real generator and against small
programs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lrl.errors import NotRunning
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.members.run_file import find_generator
from tests.cli.conftest import Say
from tests.lent_server import LentServer

WITHOUT_A_TEMPLATE = """
import http.server, json, sys
class Base(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(200, {"data": [{"id": "base", "max_model_len": 40}]})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.say(400 if self.path == "/tokenize" else 200, {"route": self.path, **body})
    def say(self, status, answer):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Base).serve_forever()
"""
ODD_PROMPT = """it's $(touch harm) `touch harm` "two" \\ %s"""

WATCHING_CURL = """#!/bin/sh
cat /proc/[0-9]*/cmdline >"$SEEN/command_lines" 2>/dev/null
exec {curl} "$@"
"""


class Scripted(Server):
    """A generator that runs a Python program in place of vLLM."""

    program = WITHOUT_A_TEMPLATE

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.program, "--host", "127.0.0.1", "--port", str(self.port)]


class Silent(Scripted):
    """One that does not answer yet."""

    program = "import time; time.sleep(600)"


@pytest.fixture
def two_generators(tmp_path: Path) -> Iterator[list[Server]]:
    """Generators 0 and 12 of the run in `tmp_path`."""
    with started(Scripted, tmp_path, 0) as first, started(Scripted, tmp_path, 12) as second:
        yield [first, second]


@contextmanager
def started(kind: type[Server], folder: Path, number: int = 0) -> Iterator[Server]:
    server = kind("base", ServerSettings(), "shared_memory", [], folder, number, "a run")
    try:
        server.start()
        if kind is not Silent:
            server.wait_ready()
        yield server
    finally:
        server.stop()


def run_in_shell(lines: str, folder: Path, **variables: str) -> Any:
    """Runs the lines in bash, in an empty folder; returns the JSON that they print."""
    home = folder / "home"
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "TMPDIR": str(home)} | variables
    how: dict[str, Any] = {"cwd": home, "env": environment, "timeout": 120}
    done = subprocess.run(["bash"], input=lines, capture_output=True, text=True, **how)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


def test_a_live_policy_answers_the_printed_lines_and_its_token_is_nowhere_to_be_read(
    lent_server: LentServer, tmp_path: Path, say: Say
) -> None:
    run, token = lent_server.log_path.parent, lent_server.token
    status, lines, _ = say("prompt", str(run), ODD_PROMPT)
    assert status == 0 and token in lines and lent_server.url in lines
    curl = tmp_path / "curl"
    curl.write_text(WATCHING_CURL.format(curl=shutil.which("curl")))
    curl.chmod(0o755)
    answer = run_in_shell(
        lines, tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", SEEN=str(tmp_path)
    )
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] >= 1
    command_lines = (tmp_path / "command_lines").read_bytes()
    assert b"lrl.vllm_plugin.plugin" in command_lines, "it has seen them all"
    files = [path for folder in (run, tmp_path) for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 3 and not any(token.encode() in path.read_bytes() for path in files)


def test_a_policy_without_a_chat_template_completes_the_prompt_as_it_was_typed(
    two_generators: list[Server], tmp_path: Path, say: Say
) -> None:
    lines = say("prompt", str(tmp_path), ODD_PROMPT)[1]
    answer = run_in_shell(lines, tmp_path)
    expected = {"route": "/v1/completions", "model": "base", "max_tokens": 20}
    assert expected.items() <= answer.items()
    assert answer["prompt"] == ODD_PROMPT and answer["cache_salt"].isdecimal()
    assert not (tmp_path / "home" / "harm").exists()


def test_a_generator_is_found_by_number_under_any_name_of_its_run_until_its_process_ends(
    two_generators: list[Server], tmp_path: Path, say: Say
) -> None:
    for words, server in (((), two_generators[0]), (("--generator", "12"), two_generators[1])):
        assert f"{server.url}/v1\n" in say("prompt", str(tmp_path), *words)[1]
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    found = find_generator(link, 12)
    assert found.location.url == two_generators[1].url and found.token == two_generators[1].token
    assert found.token not in repr(found)
    two_generators[1].stop()
    with pytest.raises(NotRunning, match=r"\[0\]"):
        find_generator(link, 12)


def test_a_generator_that_does_not_answer_yet_is_named_with_its_log(
    tmp_path: Path, say: Say
) -> None:
    with started(Silent, tmp_path) as server:
        status, out, error = say("prompt", str(tmp_path))
    assert (status, out) == (2, "") and server.url in error and str(server.log_path) in error
