"""Environments: what answers the turns of a policy. It hides where they run.

A worker imports this room, so it imports no torch.
"""

from lrl.environments.base import Environment, Message, Observation, Policy, ToolCall, Written
from lrl.environments.tools import Tools
from lrl.environments.turns import Turns

__all__ = [
    "Environment",
    "Message",
    "Observation",
    "Policy",
    "ToolCall",
    "Tools",
    "Turns",
    "Written",
]
