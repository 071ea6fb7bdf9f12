"""What the benchmarks' runs are made of: a silent trainer, and vLLM servers that many runs use, one
after another, which saves half a minute each.

Every run syncs its own weights at its start, so the earlier weights of a server do not matter, as
long as all runs have policies of one architecture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

import lrl
from lrl.generators.client import GeneratorClient
from lrl.generators.server import Server
from lrl.run import Run


def quiet_trainer(steps: int, folder: Path, **more: Any) -> L.Trainer:
    """Returns a trainer that prints nothing, on the CPU and without files by default."""
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    return L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        default_root_dir=folder,
        enable_model_summary=False,
        **(usual | more),
    )


class EveryStep(L.Callback):
    """A callback that looks at each step when it and its sync are over; put it behind those."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any
    ) -> None:
        self.step_done(trainer)

    def step_done(self, trainer: Any) -> None:
        raise NotImplementedError


class OnlyTakes(lrl.PolicyModule):
    """A policy that takes a step's responses, packs them, and learns nothing from them."""

    def training_step(self, step: Any, batch_idx: int) -> None:
        for _ in step:
            pass
        optimizer: Any = self.optimizers()
        optimizer.step()  # without gradients; Lightning counts steps by these calls
        step.finish()


class LentServer(Server):
    """A server that a run starts if it is not running, and never stops."""

    def start(self) -> None:
        if not self.alive:
            super().start()

    def stop(self) -> None:
        pass

    def end(self) -> None:
        super().stop()


def serve_first_version(server: Server) -> None:
    """Starts a server without a run; its own weights are version 0."""
    server.start()
    server.wait_ready()
    asyncio.run(_name_version(server))


async def _name_version(server: Server) -> None:
    client = GeneratorClient(server.url, server.name, server.token, server.location.context())
    await client.post("/update_weight_version", {"new_version": "0"}, deadline_s=60.0)
    await client.close()


class Borrowing(lrl.AsyncSingleDevice):
    """The strategy with lent servers instead of servers that it starts. One writes `capacity`
    rollouts at once; its other places are for evaluations."""

    def __init__(
        self, server: LentServer, capacity: int, others: Sequence[LentServer] = (), **how: Any
    ) -> None:
        settings = replace(server.settings, max_num_seqs=capacity)
        devices = {"generator_devices": 1 + len(others)}
        super().__init__(weight_transfer=server.backend, server=settings, **(devices | how))
        self.lent = [server, *others]

    def make_servers(self, run: Run) -> list[Server]:
        return list(self.lent)


@contextmanager
def lent_servers(
    count: int,
    model: Path,
    settings: lrl.ServerSettings,
    folder: Path,
    devices: Sequence[int] = (),
) -> Iterator[list[LentServer]]:
    """Lends servers to one run at a time; they start with their first run and end with this
    context. `model` is a policy of the runs' architecture; `devices` are CUDA indices of each."""
    with ExitStack() as ends:
        servers = [
            LentServer(str(model), settings, "shared_memory", list(devices), folder, n)
            for n in range(count)
        ]
        for server in servers:
            ends.callback(server.end)
        yield servers


@contextmanager
def lent_server(
    model: Path, settings: lrl.ServerSettings, folder: Path, devices: Sequence[int] = ()
) -> Iterator[LentServer]:
    with lent_servers(1, model, settings, folder, devices) as servers:
        yield servers[0]
