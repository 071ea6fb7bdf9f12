"""A real server for a judge or a reward model, which answers each response as a test says."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

TEMPLATE = "Score it from 0 to 10.\n{response}"
"""The line before the form of the answer is the response, by which the server chooses its reply."""


class Reply(NamedTuple):
    status: int
    body: str
    headers: dict[str, str]


HANG = Reply(0, "hang", {})
CLOSE = Reply(0, "close", {})


def says(text: str | None, finish_reason: str = "stop") -> Reply:
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason}]
    return Reply(200, json.dumps({"choices": choices}), {})


def fails(status: int, message: str = "no", **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, json.dumps({"error": {"message": message}}), named)


def gives(*scores: float) -> Reply:
    """What vLLM's route for classification answers."""
    labels = [{"index": 0, "label": "LABEL_0", "probs": scores, "num_classes": len(scores)}]
    return Reply(200, json.dumps({"object": "list", "data": labels}), {})


class JudgeServer:
    route = "/v1/chat/completions"
    usual = says('{"reason": "Well.", "score": 7}')

    def __init__(self) -> None:
        self.replies: dict[str, list[Reply]] = {}
        """By response, in order; the last one stays. Other responses get `usual`."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.asked: Counter[str] = Counter()  # by response
        self.together: threading.Barrier | None = None  # for which all requests wait
        self.released = threading.Event()
        self.url = ""
        self._lock = threading.Lock()

    def reply_to(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        response = body["messages"][-1]["content"].partition("\n\n")[0].splitlines()[-1]
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.asked[response] += 1
            script = self.replies.get(response, [self.usual])
            reply = script[0] if len(script) == 1 else script.pop(0)
        if not path.endswith(self.route):
            return fails(404, f"no route {path}")
        if self.together is not None:
            self.together.wait(60)
        return reply


class ScoreServer(JudgeServer):
    route = "/classify"
    usual = gives(0.5)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # connections at once; more would be tried again a second later


@contextmanager
def served(judge_server: JudgeServer | None = None) -> Iterator[JudgeServer]:
    judge_server = judge_server or JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.title(): value for name, value in self.headers.items()}
            reply = judge_server.reply_to(self.path, headers, json.loads(text))
            if reply == HANG:
                judge_server.released.wait(60)
            if reply in (HANG, CLOSE):
                self.close_connection = True
                return
            self.send_response(reply.status)
            content = reply.body.encode()
            for name, value in (reply.headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *words: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    judge_server.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield judge_server
    finally:
        judge_server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
