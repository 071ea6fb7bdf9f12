"""The upload of an exported policy: refused before a run if it cannot be, whole with its card, and
no loss for the run if the hub fails."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from lrl.callbacks import Export
from lrl.errors import ConfigError
from lrl.system.hub import reach
from tests.run_without_generators import fit, trainer

NAME = "ada/sums"


class Hub(ThreadingHTTPServer):
    """The routes of the hub that an upload needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.refuses = False
        self.is_behind_a_page = False
        """Whether something before it answers with a page, as the portal of a network does."""
        self.waits_s = 0.0


class Routes(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.waits_s)
        if self.server.is_behind_a_page:
            self._send(200, b"<html>Accept the terms.</html>", "text/html")
        elif self.server.refuses or self.headers["Authorization"] != "Bearer hf_secret":
            self._answer(403, {"error": "not yours"})
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self._answer(200, {"url": f"{huggingface_hub.constants.ENDPOINT}/{NAME}"})
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            inline = {"uploadMode": "regular", "shouldIgnore": False}
            self._answer(200, {"files": [{"path": path, **inline} for path in paths]})
        elif self.path == "/api/validate-yaml":  # of the card
            self._answer(200, {"errors": [], "warnings": []})
        else:
            self._commit([json.loads(line) for line in body.splitlines()])

    def do_GET(self) -> None:
        self._answer(404, {})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["key"] == "header":
                self.server.commits.append(line["value"]["summary"])
            else:
                file = line["value"]
                self.server.files[file["path"]] = base64.b64decode(file["content"])
        url = f"{huggingface_hub.constants.ENDPOINT}/{NAME}/commit/1"
        self._answer(200, {"commitUrl": url, "commitOid": "1" * 40})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    reach.cache_clear()
    yield server
    reach.cache_clear()
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_whole_folder_with_its_card_is_on_the_hub_after_the_run(
    policy: str, tmp_path: Path, hub: Hub
) -> None:
    export = Export(str(tmp_path / "policy"), push_to_hub=NAME)
    running = trainer(tmp_path, export, max_steps=1)
    fit(policy, running)
    assert [(repo["name"], repo["visibility"]) for repo in hub.made] == [("sums", "private")]
    assert hub.commits == ["lrl: after 1 steps"]
    files = [path for path in (tmp_path / "policy").rglob("*") if path.is_file()]
    assert hub.files == {
        str(file.relative_to(tmp_path / "policy")): file.read_bytes() for file in files
    }
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= set(hub.files)
    card = huggingface_hub.ModelCard(hub.files["README.md"].decode())
    assert card.data.library_name == "transformers" and "lrl" in card.data.tags


FAULTS: dict[str, tuple[dict[str, Any], float, str]] = {
    "it refuses": ({"refuses": True}, 60.0, "403"),
    "a portal answers": ({"is_behind_a_page": True}, 60.0, "not on the hub"),
    "it is slow": ({"waits_s": 3.0}, 1.0, "it is not there after 1 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hub_that_fails_costs_the_run_nothing_and_the_log_says_how_to_upload(
    policy: str,
    tmp_path: Path,
    hub: Hub,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    state, timeout_s, said = FAULTS[fault]
    vars(hub).update(state)
    monkeypatch.setattr("lrl.callbacks.export.UPLOAD_S", timeout_s)
    folder = tmp_path / "policy"
    export = Export(str(folder), push_to_hub=NAME)
    fit(policy, trainer(tmp_path, export, max_steps=1))
    assert f"hf upload {NAME} {folder}" in caplog.text and said in caplog.text
    assert (folder / "model.safetensors").exists() and not hub.commits


def test_an_upload_that_cannot_begin_is_refused_before_a_step(
    policy: str, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = trainer(tmp_path, Export(str(tmp_path / "policy"), push_to_hub=NAME), max_steps=1)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("lrl.callbacks.export.get_token", lambda: None)
    with pytest.raises(ConfigError, match="there is no token"):
        fit(policy, running)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    reach.cache_clear()
    with pytest.raises(ConfigError, match="cannot be reached"):
        fit(policy, running)
    with pytest.raises(ValueError, match="a/b/c"):
        Export(push_to_hub="a/b/c")
    assert running.global_step == 0
