"""A run whose generator is a small program, and whose trainer is a model of Lightning's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lrl
from lrl.callbacks import WeightSync
from lrl.generators.client import GeneratorClient
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.run import Run


def let_requests_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every generator answers, like every running process."""

    async def respond(self: GeneratorClient, *words: Any, **settings: Any) -> None:
        """Succeeds."""

    monkeypatch.setattr(GeneratorClient, "prompt_logprobs", respond)


class ScriptedRun(lrl.AsyncSingleDevice):
    """A strategy whose generator is `program`."""

    def __init__(self, program: type[Server], folder: Path, settings: ServerSettings) -> None:
        super().__init__(server=settings)
        self.program = program
        self.folder = folder
        self.settings = settings
        self.parallel_devices = [torch.device("cpu")] * 2

    def make_servers(self, run: Run) -> list[Any]:
        words = ("shared_memory", [], self.folder, 0, self.run_id, self.token)
        return [self.program(str(self.folder), self.settings, *words)]

    def run_with(self, data: Any) -> Run:
        """Returns a run of a policy in the folder, before its first step."""
        policy: Any = SimpleNamespace(
            policy_folder=str(self.folder),
            dtype_name="float32",
            whole_weights=lambda: iter(()),
            free_sent=lambda: None,
        )
        trainer: Any = SimpleNamespace(
            strategy=self,
            lightning_module=policy,
            datamodule=data,
            callbacks=[WeightSync()],
            state=SimpleNamespace(fn="fit"),
            loggers=[],
            logger=None,
            default_root_dir=str(self.folder),
            global_step=0,
            interrupted=False,
            is_global_zero=True,
        )
        return Run(trainer, policy, data)
