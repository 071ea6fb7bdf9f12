"""Objectives: the losses of a micro-batch's trained tokens, one file each."""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.system.imports import lazy_names

if TYPE_CHECKING:
    from lrl.objectives.aipo import AIPO
    from lrl.objectives.base import Diagnostics, Objective, Tokens, check_mismatch
    from lrl.objectives.cispo import CISPO
    from lrl.objectives.decoupled_ppo import DecoupledPPO
    from lrl.objectives.gspo import GSPO
    from lrl.objectives.icepop import IcePop
    from lrl.objectives.ppo import PPO
    from lrl.objectives.reinforce import REINFORCE
    from lrl.objectives.tba import TBA
    from lrl.objectives.tis import TIS
    from lrl.objectives.topr import TOPR

__all__, __getattr__, __dir__ = lazy_names(__name__)
