"""A rank that serves its part, and breaks, stalls or lies as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from lrl.system.endpoint import Location
from lrl.weights.parts import PARTS, Part, content_of

Fault = Literal["none", "cut", "stall", "damage", "short", "gone", "not yet"]


@dataclass
class ScriptedSource:
    """One version's parts, and the fault of each request for a block in their order; those after
    the last have none."""

    parts: dict[int, Part]
    """By rank."""
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """What was asked for: a rank, and a block or its difference."""
    location: Location = field(default_factory=Location)
    ends: threading.Event = field(default_factory=threading.Event)

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        rank, what = handler.path.removeprefix(PARTS).split("/")[1:]
        fault: Fault = "none"
        if what not in ("header", "delta"):
            self.asked.append(f"{rank}/{what}")
            fault = self.faults.pop(0) if self.faults else "none"
        body = content_of(self.parts[int(rank)], what)
        if fault == "damage":
            body = bytes([body[0] ^ 1]) + body[1:]
        handler.send_response({"gone": 404, "not yet": 409}.get(fault, 200))
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        sent = {"cut": len(body) // 2, "stall": len(body) // 2, "short": len(body) - 1}
        handler.wfile.write(body[: sent.get(fault, len(body))])
        handler.wfile.flush()
        if fault == "stall":
            self.ends.wait(300)
        handler.close_connection = True


@contextmanager
def scripted(parts: dict[int, Part], *faults: Fault) -> Iterator[ScriptedSource]:
    """Runs one on loopback."""
    source = ScriptedSource(parts, list(faults))

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
    source.location = Location(f"http://127.0.0.1:{server.server_port}")
    try:
        yield source
    finally:
        source.ends.set()
        server.shutdown()
        server.server_close()
