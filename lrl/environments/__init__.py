"""Environments: what answers the turns of a policy. It hides where they run.

A worker imports this room, so it imports no torch.
"""

from lrl.environments.base import Environment, Observation, Policy, Written
from lrl.environments.turns import Turns

__all__ = ["Environment", "Observation", "Policy", "Turns", "Written"]
