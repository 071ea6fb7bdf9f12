"""The token middleware alone and on every route of a real server; and what lrl's own servers answer
to those without the token, and say of them in the run's log."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator

import pytest
from aiohttp import web
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from lrl.environments.agent_server import AgentServer
from lrl.generators.client import FLUSH, WRITE
from lrl.system.auth import TOKEN_VARIABLE, TokenMiddleware, TokenServer
from lrl.system.endpoint import Endpoint
from tests.event_loop import LOOP
from tests.http_call import call
from tests.lent_server import LentServer

TOKEN = ("Authorization", "Bearer secret")
WRONG = [
    [],
    [("Authorization", "Bearer wrong")],
    [("Authorization", "secret")],
    [("Authorization", "Bearer secre")],
    [("Authorization", "Bearer ")],
    [TOKEN, ("Authorization", "Bearer wrong")],
]


def test_the_token_opens_every_path_and_without_it_nothing_but_health_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    app = Starlette(routes=[Route("/{path:path}", lambda request: PlainTextResponse("reached"))])
    with TestClient(TokenMiddleware(app)) as client:  # its start and end ask for no token
        assert client.get("/pause", headers=[TOKEN]).text == "reached"
        assert client.get("/health").text == "reached"
        for path in ("/pause", "/", "/health/", "/healthz", "//health"):
            for headers in WRONG:
                response = client.get(f"http://testserver{path}", headers=headers)
                assert response.status_code == 401 and "secret" not in response.text, (
                    path,
                    headers,
                )
        with (
            pytest.raises(WebSocketDisconnect) as closed,
            client.websocket_connect("/v1/realtime"),
        ):
            pass
        assert closed.value.code == 1008


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
        for headers in WRONG[:2]:
            status, _ = call(lent_server.url, method, path, dict(headers))
            assert status == 401, f"{method} {path} with {headers}"
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
    """The ports of a server with a thread of its own, and of one for agents."""
    open_route = [web.post("/broken", broken)]
    guarded = TokenServer(Endpoint(), "token", open_route, open_paths=["/broken"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = LOOP.submit(AgentServer().serve(listener))
        yield [guarded.port, listener.getsockname()[1]]
        serving.cancel()
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
