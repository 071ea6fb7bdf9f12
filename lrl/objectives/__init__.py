"""Objectives: the losses that train the policy, one file each, over the trained tokens of a
micro-batch."""

from lrl.objectives.aipo import AIPO
from lrl.objectives.base import Objective, Tokens
from lrl.objectives.cispo import CISPO
from lrl.objectives.decoupled_ppo import DecoupledPPO
from lrl.objectives.diagnostics import Diagnostics, check_mismatch
from lrl.objectives.gspo import GSPO
from lrl.objectives.icepop import IcePop
from lrl.objectives.ppo import PPO
from lrl.objectives.reinforce import REINFORCE
from lrl.objectives.tba import TBA
from lrl.objectives.tis import TIS
from lrl.objectives.topr import TOPR

__all__ = [
    "AIPO",
    "CISPO",
    "DecoupledPPO",
    "Diagnostics",
    "GSPO",
    "IcePop",
    "Objective",
    "PPO",
    "REINFORCE",
    "TBA",
    "TIS",
    "TOPR",
    "Tokens",
    "check_mismatch",
]
