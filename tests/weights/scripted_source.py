"""A source of files that breaks, stalls or lies as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from lrl.system.endpoint import Location

Fault = Literal["none", "cut", "stall", "damage", "short", "whole instead of the rest"]


@dataclass
class ScriptedSource:
    """One file, and the fault of each request in their order; those after the last have none."""

    content: bytes
    faults: list[Fault] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """The first byte that each request asked for."""
    url: str = ""
    ends: threading.Event = field(default_factory=threading.Event)

    @property
    def location(self) -> Location:
        return Location(self.url)

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        asked = handler.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        fault = self.faults[len(self.starts)] if len(self.starts) < len(self.faults) else "none"
        self.starts.append(start)
        if fault == "whole instead of the rest":
            start = 0
        body = self.content[start:]
        if fault == "damage":
            body = bytes([body[0] ^ 1]) + body[1:]
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(body) - (fault == "short")))
        handler.end_headers()
        half = len(body) // 2 if fault in ("cut", "stall") else len(body) - (fault == "short")
        handler.wfile.write(body[:half])
        handler.wfile.flush()
        if fault == "stall":
            self.ends.wait(300)
        handler.close_connection = True


@contextmanager
def scripted(content: bytes, *faults: Fault) -> Iterator[ScriptedSource]:
    """Runs one on loopback."""
    source = ScriptedSource(content, list(faults))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            source.respond(self)

        def log_message(self, *words: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    source.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield source
    finally:
        source.ends.set()
        server.shutdown()
        server.server_close()
