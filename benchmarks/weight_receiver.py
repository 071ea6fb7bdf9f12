"""A receiver of weights: a generator's routes of a sync and of pull, in front of tensors in the
place of vLLM's model.

    LRL_GENERATOR_TOKEN=... python -m benchmarks.weight_receiver 127.0.0.1

Listens at that address and prints its port. An update loads the file as
`lrl.vllm_plugin.engines.FileEngine` does: its checksum, then a copy of every tensor. vLLM's
conversion to the form of its kernels is left out, which is the same for every transport."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from typing import Any

import uvicorn
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse
from torch import Tensor

from lrl.system.auth import TokenMiddleware
from lrl.vllm_plugin.fetched_files import PullRoutes
from lrl.weights.version_file import check_file

COPY = "/copy"
"""The route that copies bytes over a plain connection."""


class Receiver:
    """The application behind the token and the routes of pull."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.state: dict[str, dict[str, Any]] = {
            "/is_paused": {"is_paused": False},
            "/weight_info": {},
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = await request.json() if await request.body() else {}
        found = await asyncio.to_thread(self.answer, scope["path"], body)
        await JSONResponse(found)(scope, receive, send)

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        if route in ("/pause", "/resume"):
            self.state["/is_paused"] = {"is_paused": route == "/pause"}
        elif route == "/update_weights":
            self.load(**body["update_info"])
        elif route == "/finish_weight_update":
            self.state["/weight_info"] = {"weight_version": body["weight_version"]}
        elif route == COPY:
            copy(**body)
        return self.state.get(route, {})

    def load(self, file: str, checksum: str) -> None:
        check_file(file, checksum)
        for name, weight in load_file(file).items():
            if name in self.weights:
                self.weights[name].copy_(weight)
            else:
                self.weights[name] = weight.clone()


def copy(host: str, port: int) -> None:
    with (
        socket.create_connection((host, port)) as connection,
        connection.makefile("rb") as stream,
        os.fdopen(os.memfd_create("copy"), "wb") as file,
    ):
        shutil.copyfileobj(stream, file, 2**20)


def main() -> None:
    listener = socket.create_server((sys.argv[1], 0))
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    app = TokenMiddleware(PullRoutes(Receiver()))
    uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)).run(
        [listener]
    )


if __name__ == "__main__":
    main()
