"""The upload of an exported policy: refused before a run if it cannot be, whole with its card, and
no loss for the run if the hub fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError

from lrl.callbacks import Export
from lrl.errors import ConfigError
from tests.run_without_generators import fit, trainer

NAME = "ada/sums"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hub's client, with its own signatures; it notes the files of each folder that it sends."""
    client = create_autospec(huggingface_hub.HfApi, instance=True)
    client.create_repo.return_value.repo_id = NAME
    client.sent = {}

    def send(folder_path: Path, **_: Any) -> None:
        files = (path for path in folder_path.rglob("*") if path.is_file())
        client.sent |= {str(path.relative_to(folder_path)): path.read_bytes() for path in files}

    client.upload_folder.side_effect = send
    monkeypatch.setattr("lrl.callbacks.export.HfApi", lambda: client)
    monkeypatch.setattr("lrl.callbacks.export.hub.reach", lambda: True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return client


def test_the_whole_folder_with_its_card_is_on_the_hub_after_the_run(
    policy: str, tmp_path: Path, hub: Any
) -> None:
    folder = tmp_path / "policy"
    fit(policy, trainer(tmp_path, Export(str(folder), push_to_hub=NAME), max_steps=1))
    hub.create_repo.assert_called_once_with(NAME, private=True, exist_ok=True)
    how = {"repo_id": NAME, "folder_path": folder, "commit_message": "lrl: after 1 steps"}
    hub.upload_folder.assert_called_once_with(**how)
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= set(hub.sent)
    card = huggingface_hub.ModelCard(hub.sent["README.md"].decode())
    assert card.data.library_name == "transformers" and "lrl" in card.data.tags


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "it refuses": (Mock(side_effect=HTTPError("403: not yours")), "403"),
    "a portal answers": (Mock(side_effect=json.JSONDecodeError("no JSON", "<html>", 0)), "no JSON"),
    "it is slow": (lambda *_, **__: time.sleep(3.0), "it is not there after 1 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_hub_that_fails_costs_the_run_nothing_and_the_log_says_how_to_upload(
    policy: str,
    tmp_path: Path,
    hub: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    hub.create_repo.side_effect, said = FAULTS[fault]
    monkeypatch.setattr("lrl.callbacks.export.UPLOAD_S", 1.0)
    folder = tmp_path / "policy"
    export = Export(str(folder), push_to_hub=NAME)
    fit(policy, trainer(tmp_path, export, max_steps=1))
    assert f"hf upload {NAME} {folder}" in caplog.text and said in caplog.text
    assert (folder / "model.safetensors").exists()


def test_an_upload_that_cannot_begin_is_refused_before_a_step(
    policy: str, tmp_path: Path, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = trainer(tmp_path, Export(str(tmp_path / "policy"), push_to_hub=NAME), max_steps=1)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("lrl.callbacks.export.get_token", lambda: None)
    with pytest.raises(ConfigError, match="there is no token"):
        fit(policy, running)
    monkeypatch.setattr("lrl.callbacks.export.hub.reach", lambda: False)
    with pytest.raises(ConfigError, match="cannot be reached"):
        fit(policy, running)
    assert running.global_step == 0
