"""The hub is asked once, and soon, whether it can be reached; the endpoint is one of this
machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from lrl.system import hub
from lrl.training.model import open_tokenizer

PROXIES = [f"{kind}_proxy" for kind in ("http", "https", "all", "no")]


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as once:
        return int(once.getsockname()[1])


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    reach = hub.reach
    reach.cache_clear()
    yield
    reach.cache_clear()


def test_a_mistyped_model_without_a_network_is_refused_without_another_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match="no/such-model.*AutoTokenizer cannot open it"),
    ):
        open_tokenizer("no/such-model")
    assert [record.name for record in caplog.records] == ["lrl.system.hub"], (
        "no client has tried again"
    )
    assert "127.0.0.1 cannot be reached (Connection refused)" in caplog.text
    assert not hub.reach()
    assert os.environ["HF_HUB_OFFLINE"] == "1", "generators do not try either"


@pytest.mark.parametrize("behind_a_proxy", [False, True])
def test_a_hub_that_answers_or_its_proxy_stays_in_use(
    behind_a_proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        if behind_a_proxy:
            monkeypatch.setenv("http_proxy", url)
        else:
            monkeypatch.setattr(constants, "ENDPOINT", url)
        assert hub.reach()
    assert not constants.is_offline_mode() and os.environ["HF_HUB_OFFLINE"] == "0"
