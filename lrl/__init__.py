"""Asynchronous reinforcement learning of language models on PyTorch Lightning and vLLM.

  prompts ─▶ controller ─▶ environment ⇄ generators ─▶ rewards ─▶ groups ─▶ step stream ─▶ policy + objective ─▶ update
                  ▲  pacing                   ▲                                                                     │
                  │  dispatch                 └──────── weights ◀── callbacks/weight_sync ◀── version v+1 ──────────┤
                  └──────────────── admit more prompts ◀────────────────────────────────────────────────────────────┘

Nothing else flows. Data moves left to right once; weights and permission to start move back once a
step.

The names below are imported at their first use: every reward worker imports `lrl`, and must not
import torch.
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from lrl import advantages, callbacks, errors, objectives, rewards
    from lrl.advantages import Advantages, GroupMean
    from lrl.datamodule import RolloutDataModule
    from lrl.errors import ConfigError, LrlError
    from lrl.generators.settings import ServerSettings
    from lrl.policy import PolicyModule
    from lrl.rollouts.prompts import Prompts
    from lrl.rollouts.reasoning_gym import ReasoningGym
    from lrl.rollouts.replay import Replay
    from lrl.strategies.ddp import AsyncDDP
    from lrl.strategies.fsdp import AsyncFSDP
    from lrl.strategies.single_device import AsyncSingleDevice
    from lrl.training.critic import Critic
    from lrl.training.lora import LoRA
    from lrl.training.reference import Reference
    from lrl.types import Group, MicroBatch, Prompt, Rollout

_HOME = {
    "Advantages": "lrl.advantages",
    "AsyncDDP": "lrl.strategies.ddp",
    "AsyncFSDP": "lrl.strategies.fsdp",
    "AsyncSingleDevice": "lrl.strategies.single_device",
    "ConfigError": "lrl.errors",
    "Critic": "lrl.training.critic",
    "Group": "lrl.types",
    "GroupMean": "lrl.advantages",
    "LoRA": "lrl.training.lora",
    "LrlError": "lrl.errors",
    "MicroBatch": "lrl.types",
    "PolicyModule": "lrl.policy",
    "Prompt": "lrl.types",
    "Prompts": "lrl.rollouts.prompts",
    "ReasoningGym": "lrl.rollouts.reasoning_gym",
    "Reference": "lrl.training.reference",
    "Replay": "lrl.rollouts.replay",
    "Rollout": "lrl.types",
    "RolloutDataModule": "lrl.datamodule",
    "ServerSettings": "lrl.generators.settings",
}

_MODULES = ("advantages", "callbacks", "errors", "objectives", "rewards")

__all__ = [*_HOME, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"lrl.{name}")
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'lrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("lrl")
    except metadata.PackageNotFoundError as error:
        raise AttributeError(
            "lrl is not installed, so it has no version: pip install -e ."
        ) from error
