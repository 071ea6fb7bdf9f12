"""The transports of weights side by side: seconds, pause, bytes and rank 0's memory, beside a plain
copy over TCP.

    python -m benchmarks.weight_transports                                    measure and print
    python -m benchmarks.weight_transports --layers 1 --receivers 1 2 --repeats 1     a rehearsal

A Llama of 265 million parameters, 530 MB in bfloat16, is trained for `--steps` steps of AdamW in
float32 on random tokens; its last two versions are synced. For each number of receivers, these take
turns: as many bytes over plain connections into the receivers' shared memory (`wire`); the same by
`shared_memory`; `pull` to receivers that hold no version, and to those that hold the one before.

All are on one machine, and the connections on loopback. A receiver is a process with a generator's
routes and tensors in the place of vLLM's model (`benchmarks.weight_receiver`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.gpu.machine import Machine
from benchmarks.weight_receiver import COPY
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.settings import ServerSettings
from lrl.system.auth import TOKEN_VARIABLE
from lrl.system.endpoint import LOOPBACK, Endpoint
from lrl.system.event_loop import LoopThread
from lrl.system.machine import memory_file
from lrl.weights.pull import Pull
from lrl.weights.shared_memory import SharedMemory
from lrl.weights.sync import Sync
from lrl.weights.transport import Transport
from lrl.weights.version_file import path_of
from tests.weights.whole_weights import WholeWeights

DEADLINE_S = 600.0
MB = 1e6

SETTINGS: dict[str, Any] = {
    "receivers": ([1, 2, 4], "of a sync"),
    "lrs": ([1e-6, 1e-5], "learning rates"),
    "layers": (16, "of the policy; 16 make 530 MB"),
    "steps": (5, "before the sync"),
    "repeats": (3, "of all"),
}
COLUMNS = {
    "sync (s)": ("sync_s", ".2f"),
    "pause (s)": ("pause_s", ".2f"),
    "rank 0 sent (MB)": ("sent_mb", ",.0f"),
    "fetched in all (MB)": ("fetched_mb", ",.0f"),
    "rank 0's peak (MB)": ("peak_mb", ",.0f"),
}
Version = dict[str, Tensor]


async def accept(receiver: Generator) -> None:
    pass


@dataclass(frozen=True)
class Scene:
    """Receivers, and two versions of a policy in float32."""

    receivers: list[Generator]
    loop: LoopThread
    versions: tuple[Version, Version]
    memory: Machine = field(default_factory=Machine)

    def sync(self, transport: type[Transport], upto: int) -> dict[str, float]:
        """Syncs the versions up to number `upto` in turn, by a transport of its own; returns the
        figures of the last.

        Raises:
            RuntimeError: A receiver failed.
        """
        pool = GeneratorPool(self.receivers)
        for receiver in self.receivers:
            receiver.version = -1  # that of another transport
        weights = WholeWeights(lambda: self.weights(number, halves=transport is SharedMemory))
        sync = Sync(
            pool,
            self.loop,
            transport(weights, f"bench-{secrets.token_hex(4)}"),
            lambda generators: accept,
            deadline_s=DEADLINE_S,
            silence_s=DEADLINE_S,
        )
        made: Any = sync.transport
        try:
            for number in range(upto + 1):
                sent, fetched = made.sent_bytes, made.fetched_bytes
                gc.collect()
                self.memory.begin()
                before, started = self.memory.peak, time.monotonic()
                if failed := sync.sync_now(number):
                    raise RuntimeError("; ".join(failed.values()))
                ended = time.monotonic()
            found = {
                "sync_s": ended - started,
                "pause_s": sync.pause_seconds,
                "peak_mb": (self.memory.peak - before) / MB,
            }
            if transport is Pull:
                found["sent_mb"] = (made.sent_bytes - sent) / MB
                found["fetched_mb"] = (made.fetched_bytes - fetched) / MB
            return found
        finally:
            sync.close()
            weights.staging.close()

    def weights(self, number: int, halves: bool) -> Iterator[tuple[str, Tensor]]:
        for name, one in self.versions[number].items():
            yield name, half(one) if halves else one


def half(weight: Tensor) -> Tensor:
    return weight.bfloat16() if weight.dim() > 1 else weight


def wire(scene: Scene, size: int) -> dict[str, float]:
    file = memory_file("wire")
    path = Path(path_of(file))
    path.write_bytes(os.urandom(size))
    count = len(scene.receivers)
    with socket.create_server((LOOPBACK, 0), backlog=count) as listener:
        body = {"host": LOOPBACK, "port": listener.getsockname()[1]}
        for _ in range(count):
            threading.Thread(target=send, args=(listener, path), daemon=True).start()
        posts = [one.client.post(COPY, body, deadline_s=DEADLINE_S) for one in scene.receivers]
        started = time.monotonic()
        scene.loop.wait(all_of(posts), DEADLINE_S, "plain copies")
        seconds = time.monotonic() - started
    os.close(file)
    mb = count * size / MB
    return {"sync_s": seconds, "sent_mb": mb, "fetched_mb": mb, "peak_mb": 0.0}


async def all_of(posts: Sequence[Awaitable[Any]]) -> None:
    await asyncio.gather(*posts)


def send(listener: socket.socket, path: Path) -> None:
    connection, _ = listener.accept()
    with connection, path.open("rb") as file:
        connection.sendfile(file)


METHODS: dict[str, Callable[[Scene, int], dict[str, float]]] = {
    "wire": wire,
    "shared_memory": lambda scene, size: scene.sync(SharedMemory, upto=1),
    "pull whole": lambda scene, size: scene.sync(Pull, upto=0),
    "pull delta": lambda scene, size: scene.sync(Pull, upto=1),
}
"""What is measured in turn; each returns its figures, of which some may be missing. The second
argument is the size of the version in bytes."""


def new_policy(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=30_720,
        hidden_size=1024,
        intermediate_size=2752,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    return LlamaForCausalLM(config)


def two_versions(layers: int, lr: float, steps: int) -> tuple[Version, Version]:
    """Trains a Llama on random tokens; returns its weights before and after the last of `steps`
    steps."""
    torch.manual_seed(0)
    network = new_policy(layers)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        before = copy_of(network)
        tokens = torch.randint(0, network.vocab_size, (2, 32))
        optimizer.zero_grad()
        network(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return before, copy_of(network)


def copy_of(network: LlamaForCausalLM) -> Version:
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}


@contextmanager
def receivers(count: int, loop: LoopThread, folder: Path) -> Iterator[list[Generator]]:
    token = secrets.token_hex(16)
    with ExitStack() as ends:
        made = []
        for number in range(count):
            environment = {**os.environ, TOKEN_VARIABLE: token}
            errors = ends.enter_context((folder / f"receiver-{number}.log").open("w"))
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.weight_receiver", LOOPBACK],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            ends.callback(end, process)
            assert process.stdout is not None, "it is a pipe"
            location = Endpoint(LOOPBACK).location(int(process.stdout.readline()))
            server: Any = SimpleNamespace(
                name=f"receiver {number}",
                number=number,
                url=location.url,
                location=location,
                token=token,
                settings=ServerSettings(dtype="bfloat16"),
                alive=True,
                log_tail=lambda: "",
            )
            made.append(Generator(server, 1))
            ends.callback(lambda client: loop.wait(client.close(), 5.0, "closing"), made[-1].client)
        yield made


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(60)


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    for lr, of_lr in groupby(missing, key=itemgetter("lr")):
        versions = two_versions(args.layers, lr, args.steps)
        size = sum(half(weight).nbytes for weight in versions[0].values())
        for run in of_lr:
            loop = LoopThread()
            with receivers(run["receivers"], loop, args.folder) as fleet:
                scene = Scene(fleet, loop, versions)
                found = {name: method(scene, size) for name, method in METHODS.items()}
            loop.close()
            rounded = {
                name: {one: records.rounded(value) for one, value in of.items()}
                for name, of in found.items()
            }
            yield run | {"size": size, "found": rounded}


def runs(args: argparse.Namespace) -> Iterator[Row]:
    how = arguments.chosen(args, "layers", "steps")
    for lr, repeat, count in product(args.lrs, range(args.repeats), args.receivers):
        yield how | {"lr": lr, "receivers": count, "repeat": repeat}


def table(made: Sequence[Row]) -> str:
    lines = []
    for count, method in product(sorted({one["receivers"] for one in made}), METHODS):
        of_count = [one for one in made if one["receivers"] == count]
        by_lr = method == "pull delta"
        for lr in sorted({one["lr"] for one in of_count}) if by_lr else [None]:
            runs = [one for one in of_count if lr in (None, one["lr"])]
            cells = []
            for name, form in COLUMNS.values():
                values = [r["found"][method][name] for r in runs if name in r["found"][method]]
                cells.append(format(median(values), form) if values else "")
            lines.append([count, method, "" if lr is None else f"{lr:g}", *cells])
    return records.markdown(["receivers", "transport", "lr", *COLUMNS], lines)


if __name__ == "__main__":
    arguments.run("weight_transports", __doc__, SETTINGS, runs, measure, table)
