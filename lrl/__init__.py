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

import os
import sys
from typing import TYPE_CHECKING, Any

from lrl.system.imports import lazy_names

if TYPE_CHECKING:
    __version__: str

    from lrl import advantages, callbacks, environments, errors, objectives, rewards
    from lrl.advantages import Advantages, GroupMean
    from lrl.datamodule import RolloutDataModule
    from lrl.errors import ConfigError, LrlError
    from lrl.generators.settings import ServerSettings
    from lrl.policy import PolicyModule
    from lrl.rollouts.learners import Replay
    from lrl.rollouts.prompts import Prompts
    from lrl.rollouts.reasoning_gym import ReasoningGym
    from lrl.strategies.fsdp import AsyncFSDP
    from lrl.strategies.generator_devices import AsyncSingleDevice
    from lrl.strategies.several_ranks import AsyncDDP
    from lrl.trainer import Trainer
    from lrl.training.beside.critic import Critic
    from lrl.training.beside.reference import Reference
    from lrl.training.beside.teacher import Teacher
    from lrl.training.beside.turn_critic import TurnCritic
    from lrl.training.lora import LoRA
    from lrl.types import Group, MicroBatch, Prompt, Rollout

# torch reads it once: waiting threads then sleep (`lrl.system.machine`).
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_names, _of_module, __dir__ = lazy_names(__name__)
__all__ = [*_names, "__version__"]


def __getattr__(name: str) -> Any:
    return _version() if name == "__version__" else _of_module(name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("lrl")
    except metadata.PackageNotFoundError as error:
        raise AttributeError(
            "lrl is not installed, so it has no version: pip install -e ."
        ) from error
