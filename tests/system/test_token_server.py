"""What a server answers to those without the token, and what it says of them in the run's log."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
from aiohttp import web

from lrl.environments.agent_server import AgentServer
from lrl.system.endpoint import Endpoint
from lrl.system.event_loop import LoopThread
from lrl.system.token_server import TokenServer

SECRET = b"Authorization: Bearer open-sesame"
HEAD = b"POST /a/v1/models HTTP/1.1\r\nHost: x\r\n"
MALFORMED = {
    "a zero in a header": HEAD + SECRET + b"\0\r\n\r\n",
    "a header without a colon": HEAD + SECRET.replace(b":", b"") + b"\r\n\r\n",
    "a header over two lines": HEAD + SECRET + b"\r\n and more\r\n\r\n",
    "a header that is too long": HEAD + SECRET + b"x" * 20_000 + b"\r\n\r\n",
    "two lengths": HEAD + SECRET + b"\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a length of chunks": HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "a chunk without a length": HEAD + SECRET + b"\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "an address without an end": b"GET http://[::1 HTTP/1.1\r\n" + SECRET + b"\r\n\r\n",
    "a port beyond all": b"GET http://x:99999999/ HTTP/1.1\r\n" + SECRET + b"\r\n\r\n",
    "a path that is no text": b"GET /\xed\xa0\x80 HTTP/1.1\r\n" + SECRET + b"\r\n\r\n",
    "a body that is not what it says": (
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd"
    ),
    "another protocol after the head": (
        HEAD + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\0" + SECRET
    ),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.fixture(scope="module")
def ports() -> Iterator[list[int]]:
    """The ports of a server of each kind."""
    guarded = TokenServer(
        Endpoint(), "token", [web.post("/broken", broken)], open_paths=["/broken"]
    )
    loop = LoopThread("test")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    servers = [AgentServer(), AgentServer("key")]
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
    assert {status_of(port, MALFORMED[name]) for port in ports} <= {400, 401, 404}
    assert caplog.text == ""


def test_an_error_of_a_handler_is_in_the_log(
    ports: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request = b"POST /broken HTTP/1.1\r\nHost: x\r\n" + SECRET + b"\r\nConnection: close\r\n\r\n"
    assert status_of(ports[0], request) == 500
    assert "a fault of ours" in caplog.text and "open-sesame" not in caplog.text
