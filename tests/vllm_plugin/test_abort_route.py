"""The route that ends a transfer inside a generator."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lrl.vllm_plugin.abort_route import AbortRoute, abort_mark
from lrl.weights.communicator import ABORT_ROUTE as ROUTE
from lrl.weights.communicator import transfer_name

NAME = transfer_name("of a communicator")


def ask(method: str, path: str) -> tuple[bool, list[Any]]:
    """Returns whether vLLM was reached, and what the middleware answered itself."""
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "method": method, "path": path, "headers": []}
    asyncio.run(AbortRoute(app)(scope, app, send))  # type: ignore[arg-type]
    return bool(reached), sent


def test_it_leaves_the_mark_of_that_transfer_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    reached, sent = ask("POST", f"{ROUTE}{NAME}")
    assert not reached and sent[0]["status"] == 200
    assert list(tmp_path.iterdir()) == [abort_mark(NAME)] and abort_mark(NAME) != abort_mark(
        transfer_name("another")
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"{ROUTE}{NAME}"),
        ("POST", f"{ROUTE}../../{NAME}"),
        ("POST", f"{ROUTE}{NAME}0"),
        ("POST", "/pause"),
    ],
)
def test_all_else_goes_to_vllm_and_leaves_no_file(
    method: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ask(method, path) == (True, []) and list(tmp_path.iterdir()) == []


def test_the_name_does_not_give_the_id_away() -> None:
    assert "communicator" not in NAME and len(NAME) == 16
