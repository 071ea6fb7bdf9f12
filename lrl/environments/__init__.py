"""Environments: what answers the turns of a policy. It hides where they run.

A worker imports this room, so it imports no torch; `Tools` and `Agent` are imported at their first
use.
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.environments.base import (
    BEGINNING,
    Environment,
    Message,
    Observation,
    ParsedTurn,
    Policy,
    ToolCall,
    Written,
)
from lrl.environments.turns import Turns
from lrl.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from lrl.environments.agent import Agent
    from lrl.environments.tools import Tools

_HOMES = {"Agent": "agent", "Tools": "tools"}
__all__ = [
    "BEGINNING",
    "Environment",
    "Message",
    "Observation",
    "ParsedTurn",
    "Policy",
    "ToolCall",
    "Turns",
    "Written",
    *_HOMES,
]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
