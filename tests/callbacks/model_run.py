"""A run of two generators without servers; its syncs are real."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import lrl
from lrl.callbacks import WeightSync
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.run import Run
from lrl.system.event_loop import LoopThread
from lrl.system.ranks import Ranks
from tests.weights.model_sync import Client, Direct, make_generators, weights


class ModelRun(Run):
    """A run of two generators that serve version 0."""

    def __init__(self, max_lag: int = 1, transport: type[Direct] = Direct, **settings: Any) -> None:
        strategy: Any = lrl.AsyncSingleDevice()
        strategy.parallel_devices = [torch.device("cpu")] * 2
        strategy.choose_transport = lambda: transport
        data = lrl.RolloutDataModule(
            prompts=[{"prompt": "1+1=", "answer": "2"}],
            rewards=[lrl.rewards.ExactMatch()],
            max_lag=max_lag,
        )
        data.prompts = SimpleNamespace(fingerprint="")  # type: ignore[assignment]
        data.probe_tokens = lambda count: [1, 2, 3]  # type: ignore[method-assign]
        policy: Any = SimpleNamespace(
            whole_weights=weights,
            prompt_logprobs=lambda tokens, *formats: [-1.0, -1.0],
            compute_dtype="float32",
            reference=None,
            ranks=Ranks(),
            free_sent=lambda: None,
        )
        self.settings = WeightSync(deadline_s=60.0, **settings)
        trainer: Any = SimpleNamespace(
            strategy=strategy,
            datamodule=data,
            callbacks=[self.settings],
            global_step=0,
            training=True,
            interrupted=False,
            is_global_zero=True,
            lightning_module=policy,
        )
        super().__init__(trainer, policy, data)
        loop = self.loop = LoopThread()
        self.pool = GeneratorPool(make_generators(), outage_timeout_s=60.0)
        self.fleet: Any = SimpleNamespace(
            rollouts=self.pool,
            pools=[self.pool],
            evaluation=None,
            heartbeat_s=5.0,
            call=lambda work, what: loop.wait(work, 5.0, what),
        )
        self.versions: list[int] = []
        self._calls: Any = SimpleNamespace(
            new_version=self.versions.append, state_dict=lambda step: {}
        )
        self.syncs = self.settings.make_syncs(self)
        for end in (
            loop.close,
            *(one for sync in self.syncs.values() for one in (sync.close, sync.interrupt)),
        ):
            self._ends.callback(end)

    @property
    def clients(self) -> list[Client]:
        return [generator.client for generator in self.pool.generators]  # type: ignore[misc]

    def step(self, version: int) -> None:
        self.trainer.global_step = version  # type: ignore[misc]
        self.sync()

    def hold(self, holding: bool) -> None:
        for client in self.clients:
            client.holding = holding

    def stick(self, route: str) -> None:
        for client in self.clients:
            client.stuck = route

    def end(self) -> None:
        self.hold(False)
        self.stick("")
        super().end()


def serving(generators: list[Generator]) -> list[int]:
    """The versions of those that take requests."""
    return [generator.version for generator in generators if generator.serving]
