"""A receiver of weights: a generator's routes of a sync and of pull, in front of tensors in the
place of vLLM's model.

    LRL_GENERATOR_FILES=lrl-bench-0- LRL_GENERATOR_TOKEN=... python -m benchmarks.weight_receiver 127.0.0.1

Listens at that address and prints its port. An update loads the file as
`lrl.vllm_plugin.shared_memory_engine` does: its checksum, then a copy of every tensor. Or it takes
part in a broadcast as vLLM's engine does, with gloo in the place of NCCL. vLLM's conversion to the
form of its kernels is left out, which is the same for every transport."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from lrl.weights.staged_file import checksum as checksum_of
from safetensors.torch import load_file
from starlette.requests import Request
from starlette.responses import JSONResponse
from torch import Tensor

from lrl.generators.server import FILES_VARIABLE
from lrl.system.auth import TokenMiddleware
from lrl.vllm_plugin.pull_routes import PullRoutes
from lrl.weights import communicator

COPY = "/copy"
"""The route that copies bytes over a plain connection."""


class Receiver:
    """The application behind the token and the routes of pull."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.communicator: Any = None
        self.buffers: dict[str, int] = {}
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
        elif route == "/init_weight_transfer_engine" and "nccl_unique_id_b64" in body["init_info"]:
            self.join(body["init_info"])
        elif route == "/shutdown_weight_transfer_engine":
            communicator.abort(self.communicator)
        elif route == "/update_weights" and "names" in body["update_info"]:
            self.receive(**body["update_info"])
        elif route == "/update_weights":
            self.load(**body["update_info"])
        elif route == "/finish_weight_update":
            self.state["/weight_info"] = {"weight_version": body["weight_version"]}
        elif route == COPY:
            copy(**body)
        return self.state.get(route, {})

    def load(self, file: str, checksum: int) -> None:
        if (found := checksum_of(file)) != checksum:
            raise ValueError(f"{file} has the checksum {found}, and {checksum} was sent.")
        self.replace(load_file(file).items())

    def join(self, info: dict[str, Any]) -> None:
        from tests.weights.nccl_over_gloo import install

        install()
        unique_id = base64.b64decode(info["nccl_unique_id_b64"])
        self.communicator = communicator.join(
            unique_id, info["rank_offset"], info["world_size"], torch.device("cpu")
        )
        self.buffers = {
            "buffer_size_bytes": info["packed_buffer_size_bytes"],
            "num_buffers": info["packed_num_buffers"],
        }

    def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

        dtypes = [getattr(torch, name) for name in dtype_names]
        packed_nccl_broadcast_consumer(
            iterator=zip(names, zip(shapes, dtypes, strict=True), strict=True),
            group=self.communicator,
            src=0,
            post_unpack_func=self.replace,
            device="cpu",
            **self.buffers,
        )

    def replace(self, new: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in new:
            if name in self.weights:
                self.weights[name].copy_(weight)
            else:
                self.weights[name] = weight.clone()


def copy(host: str, port: int, size: int) -> None:
    path = Path(os.environ[FILES_VARIABLE], "copy")
    left = size
    buffer = memoryview(bytearray(2**20))
    with socket.create_connection((host, port)) as connection, path.open("wb") as file:
        while left:
            count = connection.recv_into(buffer)
            if not count:
                raise ConnectionError(f"{left} of {size} bytes did not come")
            file.write(buffer[:count])
            left -= count
    path.unlink()


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
