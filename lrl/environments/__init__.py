"""Environments: what answers the turns of a policy. It hides where they run.

A worker imports this room, so it imports no torch, and each class at its first use.
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.system.imports import lazy_names

if TYPE_CHECKING:
    from lrl.environments.agent import Agent
    from lrl.environments.base import (
        BEGINNING,
        Environment,
        Message,
        Observation,
        Policy,
        ToolCall,
        Turns,
        Written,
    )
    from lrl.environments.tools import Tools

__all__, __getattr__, __dir__ = lazy_names(__name__)
