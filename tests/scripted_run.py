"""A run whose generator is a small program, and whose trainer is a model of Lightning's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lrl
from lrl.generators.client import GeneratorClient
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings


def let_requests_succeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every generator answers, like every running process."""

    async def respond(self: GeneratorClient, *words: Any, **settings: Any) -> None:
        """Succeeds."""

    monkeypatch.setattr(GeneratorClient, "prompt_logprobs", respond)
    monkeypatch.setattr(GeneratorClient, "heartbeat", respond)


class ScriptedRun(lrl.AsyncSingleDevice):
    """A strategy whose generator is `program`."""

    def __init__(self, program: type[Server], folder: Path, settings: ServerSettings) -> None:
        super().__init__()
        self.program = program
        self.folder = folder
        self.settings = settings
        self.parallel_devices = [torch.device("cpu")] * 2

    def make_servers(self, trainer: Any, placements: list[list[int]]) -> list[Any]:
        words = ("shared_memory", [], self.folder, 0, self.run_id, self.token)
        return [self.program(str(self.folder), self.settings, *words)]

    def _settings(self, trainer: Any) -> ServerSettings:
        return self.settings

    def trainer(self, data: Any) -> Any:
        """Returns a trainer of a policy in the folder, before its first step."""
        return SimpleNamespace(
            strategy=self,
            lightning_module=SimpleNamespace(policy_folder=str(self.folder)),
            datamodule=data,
            state=SimpleNamespace(fn="fit"),
            loggers=[],
            logger=None,
            default_root_dir=str(self.folder),
            global_step=0,
            interrupted=False,
        )
