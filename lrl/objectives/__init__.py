"""What the policy minimises: one file per objective."""

from lrl.objectives.aipo import AIPO
from lrl.objectives.base import Diagnostics, Objective, Tokens

__all__ = ["AIPO", "Diagnostics", "Objective", "Tokens"]
