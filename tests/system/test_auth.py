"""The token middleware alone and on every route of a real server; and what lrl's own servers answer
to those without the token, and say of them in the run's log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from lrl.environments import Agent
from lrl.environments.agent_server import AgentServer
from lrl.environments.external_agents import ExternalAgents
from lrl.generators.client import FLUSH, WRITE
from lrl.system.auth import TOKEN_VARIABLE, TokenMiddleware, TokenServer
from lrl.system.endpoint import Endpoint
from lrl.system.event_loop import LoopThread
from tests.http_call import call
from tests.lent_server import LentServer

WRONG = {
    "no token": {},
    "a wrong token": {"Authorization": "Bearer wrong"},
    "no scheme": {"Authorization": "secret"},
    "a part of the token": {"Authorization": "Bearer secre"},
    "an empty token": {"Authorization": "Bearer "},
}


def response(
    scope: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[bool, list[dict[str, Any]]]:
    """Returns whether the application was reached, and the messages of the middleware itself."""
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    reached, sent = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def receive() -> Any:
        raise AssertionError("the middleware reads no body")

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(TokenMiddleware(app)(scope, receive, send))
    return bool(reached), sent


def scope(path: str, headers: dict[str, str], kind: str = "http") -> dict[str, Any]:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": kind, "path": path, "headers": pairs}


RIGHT = {"Authorization": "Bearer secret"}
BOTH = scope("/pause", RIGHT)
BOTH["headers"].append((b"authorization", b"Bearer wrong"))
OPEN = [scope("/pause", RIGHT), scope("/health", {}), {"type": "lifespan"}]
SHUT = [
    BOTH,
    *(
        scope(path, headers)
        for path in ("/pause", "/", "/health/", "/healthz", "//health")
        for headers in WRONG.values()
    ),
]


def test_the_token_opens_every_path_and_without_it_nothing_but_health_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for asked in OPEN:
        assert response(asked, monkeypatch)[0], asked
    for asked in SHUT:
        reached, sent = response(asked, monkeypatch)
        assert not reached and sent[0]["status"] == 401 and b"secret" not in sent[1]["body"], asked
    found = response(scope("/v1/realtime", {}, "websocket"), monkeypatch)
    assert found == (False, [{"type": "websocket.close", "code": 1008}])


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=f"{TOKEN_VARIABLE} is not set"):
        TokenMiddleware(None)  # type: ignore[arg-type]


def routes(server: LentServer) -> set[tuple[str, str]]:
    """Returns (method, path) of every route, from the server's own OpenAPI document and from its
    log."""
    status, body = call(
        server.url, "GET", "/openapi.json", {"Authorization": f"Bearer {server.token}"}
    )
    assert status == 200
    documented = json.loads(body)["paths"].items()
    found = {(method.upper(), path) for path, methods in documented for method in methods}
    for path, methods in re.findall(r"Route: (\S+), Methods: (.+)", server.log_path.read_text()):
        found |= {(method.strip(), path) for method in methods.split(",")}
    return found - {("GET", "/health"), ("HEAD", "/health")}


def test_every_route_of_a_real_server_asks_for_the_token(lent_server: LentServer) -> None:
    known = routes(lent_server)
    paths = {path for _, path in known}
    assert {"/pause", "/inference/v1/generate", "/v1/chat/completions", "/collective_rpc"} <= paths
    own = {("POST", path) for path in (WRITE, FLUSH)}
    for method, path in sorted(known | own):
        for case in ("no token", "a wrong token"):
            status, _ = call(lent_server.url, method, path, WRONG[case])
            assert status == 401, f"{method} {path} with {case}"
    assert call(lent_server.url, "GET", "/health", {})[0] == 200


SECRET = b"Authorization: Bearer open-sesame"
HEAD = b"POST /a/v1/models HTTP/1.1\r\nHost: x\r\n"
MALFORMED = {
    "a header without a colon": HEAD + SECRET.replace(b":", b"") + b"\r\n\r\n",
    "a header that is too long": HEAD + SECRET + b"x" * 20_000 + b"\r\n\r\n",
    "two lengths": HEAD + SECRET + b"\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a chunk without a length": HEAD + SECRET + b"\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "an address without an end": b"GET http://[::1 HTTP/1.1\r\n" + SECRET + b"\r\n\r\n",
    "a path that is no text": b"GET /\xed\xa0\x80 HTTP/1.1\r\n" + SECRET + b"\r\n\r\n",
    "a body that is not what it says": (
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd"
    ),
    "another protocol after the head": (
        HEAD + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\0" + SECRET
    ),
}


@pytest.fixture(scope="module")
def ports() -> Iterator[list[int]]:
    """The ports of a server of each kind."""
    guarded = TokenServer(
        Endpoint(), "token", [web.post("/broken", broken)], open_paths=["/broken"]
    )
    loop = LoopThread("test")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    servers = [AgentServer(), ExternalAgents(Agent(port=0), 1.0)]
    serving = [
        loop.submit(server.serve(listener))
        for server, listener in zip(servers, listeners, strict=True)
    ]
    yield [guarded.port, *(listener.getsockname()[1] for listener in listeners)]
    for one in serving:
        one.cancel()
    loop.close()
    guarded.close()


async def broken(request: web.Request) -> web.Response:
    raise ValueError("a fault of ours")


def status_of(port: int, request: bytes) -> int:
    """Sends bytes to a server; returns the status of its answer."""
    with socket.create_connection(("127.0.0.1", port), 60.0) as connection:
        connection.sendall(request)
        return int(connection.recv(2**16).split()[1])


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_refused_without_a_word_in_the_log(
    name: str, ports: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert {status_of(port, MALFORMED[name]) for port in ports} <= {400, 401, 404, 405}
    assert caplog.text == ""


def test_an_error_of_a_handler_is_in_the_log(
    ports: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request = b"POST /broken HTTP/1.1\r\nHost: x\r\n" + SECRET + b"\r\nConnection: close\r\n\r\n"
    assert status_of(ports[0], request) == 500
    assert "a fault of ours" in caplog.text and "open-sesame" not in caplog.text
