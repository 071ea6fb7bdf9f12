"""Generators that fetch for real, over HTTP and behind the token, in front of a model that is only
a file."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import uvicorn
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse

from lrl.generators.generator import Generator
from lrl.generators.server import JoinedServer
from lrl.generators.settings import ServerSettings
from lrl.system.auth import TOKEN_VARIABLE, TokenMiddleware
from lrl.vllm_plugin.fetched_files import PullRoutes
from lrl.weights.version_file import check_file
from tests.leftovers import wait_for
from tests.weights.model_sync import ModelOfVllm

TOKEN = "secret"


class LoadsFiles(ModelOfVllm):
    """A server whose engine is `FileEngine`."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            path, body = scope["path"], await Request(scope, receive).body() or b"{}"
            self.posted.append(path)
            await JSONResponse(self.answer(path, json.loads(body)))(scope, receive, send)

    def load(self, info: dict[str, Any]) -> None:
        check_file(info["file"], info["checksum"])
        self.holds = load_file(info["file"])


class FetchingGenerator(Generator):
    def __init__(self, number: int, settings: ServerSettings) -> None:
        self.vllm = LoadsFiles()
        with mock.patch.dict(os.environ, {TOKEN_VARIABLE: TOKEN}):
            self.routes = PullRoutes(self.vllm)
            app = TokenMiddleware(self.routes)
        listener = socket.create_server((settings.host, 0))
        tls: dict[str, Any] = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
        config = uvicorn.Config(
            app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1, **tls
        )
        self.http = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.http.run, args=([listener],), daemon=True)
        self._thread.start()
        location = settings.location(listener.getsockname()[1])
        super().__init__(JoinedServer(number, location, TOKEN, settings), 4)

    def die(self) -> None:
        """Ends the server with all its connections."""
        self.http.should_exit = self.http.force_exit = True
        self._thread.join(60)


@contextmanager
def fetching_generators(count: int, settings: ServerSettings) -> Iterator[list[FetchingGenerator]]:
    made = [FetchingGenerator(number, settings) for number in range(count)]
    try:
        wait_for(lambda: all(generator.http.started for generator in made))
        yield made
    finally:
        for generator in made:
            generator.die()
