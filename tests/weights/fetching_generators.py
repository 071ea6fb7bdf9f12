"""Generators that fetch for real, over HTTP and behind the token, in front of a model that is only
a file."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import uvicorn
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from lrl.generators.generator import Generator
from lrl.generators.settings import ServerSettings
from lrl.system.auth import TOKEN_VARIABLE, TokenMiddleware
from lrl.system.endpoint import Endpoint
from lrl.vllm_plugin.fetched_files import PullRoutes
from lrl.weights.parts import FETCH
from lrl.weights.version_file import check_file

TOKEN = "secret"


class ModelOfVllm:
    """The routes of a sync, as vLLM's engine and `FileEngine` answer them."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.version = "default"
        self.paused = False
        self.posted = list[str]()
        self.frozen = threading.Event()
        """Set: an order to fetch is not answered any more."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            request = Request(scope, receive)
            self.posted.append(scope["path"])
            body = (
                await request.json() if scope["method"] == "POST" and await request.body() else {}
            )
            await self.answer(scope["path"], body)(scope, receive, send)

    def answer(self, path: str, body: dict[str, Any]) -> Response:
        if path == "/pause" or path == "/resume":
            self.paused = path == "/pause"
        if path == "/update_weights":
            info = body["update_info"]
            check_file(info["file"], info["checksum"])
            self.weights = load_file(info["file"])
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
        found = {
            "/is_paused": {"is_paused": self.paused},
            "/weight_info": {"weight_version": self.version},
        }
        return JSONResponse(found.get(path, {}))


class FetchingGenerator(Generator):
    def __init__(self, number: int, settings: ServerSettings) -> None:
        self.vllm = ModelOfVllm()
        with mock.patch.dict(os.environ, {TOKEN_VARIABLE: TOKEN}):
            self.routes = PullRoutes(self.vllm)
            app = TokenMiddleware(self._freezing)
        endpoint: Endpoint = settings
        listener = socket.create_server((endpoint.host, 0))
        tls: dict[str, Any] = {"ssl_certfile": endpoint.tls_cert, "ssl_keyfile": endpoint.tls_key}
        config = uvicorn.Config(
            app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1, **tls
        )
        self.http = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.http.run, args=([listener],), daemon=True)
        self._thread.start()
        location = endpoint.location(listener.getsockname()[1])
        server: Any = SimpleNamespace(url=location.url, location=location, settings=settings)
        vars(server).update(token=TOKEN, number=number, alive=True)
        vars(server).update(name=f"generator {number}", log_tail=lambda: "")
        super().__init__(server, 4)

    async def _freezing(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == FETCH and self.vllm.frozen.is_set():
            await receive()
            while (await receive())["type"] != "http.disconnect":
                """Says nothing until the trainer gives up."""
            return
        await self.routes(scope, receive, send)

    def die(self) -> None:
        """Ends the server with all its connections."""
        self.http.should_exit = self.http.force_exit = True
        self._thread.join(60)


@contextmanager
def fetching_generators(count: int, settings: ServerSettings) -> Iterator[list[FetchingGenerator]]:
    made = [FetchingGenerator(number, settings) for number in range(count)]
    try:
        end = time.monotonic() + 300
        while not all(generator.http.started for generator in made):
            assert time.monotonic() < end
            time.sleep(0.005)
        yield made
    finally:
        for generator in made:
            generator.die()
