"""A run of two generators without servers, whose `WeightSync` is real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import lrl
from lrl.callbacks import WeightSync
from lrl.generators.generator import Generator
from lrl.generators.health import OutageLimit
from lrl.generators.pool import GeneratorPool
from lrl.system.event_loop import LoopThread
from tests.weights.model_sync import Client, Direct, make_generators, weights


class ModelRun:
    """A trainer with two generators that serve version 0, and a `WeightSync`."""

    def __init__(self, max_lag: int = 1, transport: type[Direct] = Direct) -> None:
        self.loop = LoopThread()
        self.pool = GeneratorPool(make_generators())
        self.fleet = SimpleNamespace(
            loop=self.loop,
            rollouts=self.pool,
            pools=[self.pool],
            evaluation=None,
            heartbeat_s=5.0,
            outage_limit=OutageLimit(60.0, []),
            call=lambda work, what: self.loop.wait(work, 5.0, what),
        )
        self.data = lrl.RolloutDataModule(
            prompts=[{"prompt": "1+1=", "answer": "2"}],
            rewards=[lrl.rewards.ExactMatch()],
            max_lag=max_lag,
        )
        self.versions: list[int] = []
        self.data._calls = SimpleNamespace(  # type: ignore[assignment]
            new_version=self.versions.append, state_dict=lambda step: {}
        )
        self.data.prompts = SimpleNamespace(fingerprint="")  # type: ignore[assignment]
        self.data.probe_tokens = lambda count: [1, 2, 3]  # type: ignore[method-assign]
        self.sync = WeightSync(deadline_s=60.0)
        self.trainer: Any = SimpleNamespace(
            strategy=SimpleNamespace(
                fleet=self.fleet, transport=transport, run_id="run", root_device=torch.device("cpu")
            ),
            datamodule=self.data,
            callbacks=[self.sync],
            global_step=0,
            training=True,
            lightning_module=SimpleNamespace(
                sent_weights=weights,
                prompt_logprobs=lambda tokens: [-1.0, -1.0],
                compute_dtype="float32",
                training_dtype="float32",
            ),
        )
        self.data.trainer, self.data.weight_sync = self.trainer, self.sync

    @property
    def clients(self) -> list[Client]:
        return [generator.client for generator in self.pool.generators]  # type: ignore[misc]

    def step(self, version: int) -> None:
        self.trainer.global_step = version
        self.sync.sync(self.trainer, self.trainer.lightning_module)

    def poll(self) -> None:
        self.sync.poll(self.trainer)

    def hold(self, holding: bool) -> None:
        for client in self.clients:
            client.holding = holding

    def stick(self, route: str) -> None:
        for client in self.clients:
            client.stuck = route

    def end(self) -> None:
        self.hold(False)
        self.stick("")
        self.loop.close()


def proved(generators: list[Generator]) -> list[int]:
    """The versions of those that may be asked."""
    return [generator.version for generator in generators if generator.serving]
