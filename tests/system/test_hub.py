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

PROXIES = (
    "http_proxy",
    "HTTP_PROXY",
    "https_proxy",
    "HTTPS_PROXY",
    "all_proxy",
    "ALL_PROXY",
    "no_proxy",
    "NO_PROXY",
)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as once:
        return int(once.getsockname()[1])


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setenv(hub.SWITCH, "0")
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
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
    assert hub.offline() and os.environ[hub.SWITCH] == "1", "generators do not try either"


def test_a_hub_that_answers_stays_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.reach()
    assert not hub.offline() and os.environ[hub.SWITCH] == "0"


def test_behind_a_proxy_the_proxy_is_what_has_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        hub.reach()
    assert not hub.offline()


def test_a_model_on_this_machine_asks_nobody(
    quickstart_policy: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "reach", lambda: pytest.fail("the hub was asked"))
    assert open_tokenizer(str(quickstart_policy))
