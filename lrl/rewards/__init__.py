"""Rewards: `base` has the interface, and `pool` has workers score responses by `scoring`.

Nothing here imports torch, and a reward is imported at its first use: sympy would slow each worker.
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.system.imports import lazy_names

if TYPE_CHECKING:
    from lrl.errors import RewardFailuresError
    from lrl.rewards.base import Function, GaveUp, Reward, TurnRewards, as_reward
    from lrl.rewards.code import Code
    from lrl.rewards.judge import Judge, RewardModel
    from lrl.rewards.pool import RewardPool
    from lrl.rewards.simple import ExactMatch, Format, LengthPenalty, ReasoningGym
    from lrl.rewards.verifiers.final_answer import GSM8K
    from lrl.rewards.verifiers.math import Math

__all__, __getattr__, __dir__ = lazy_names(__name__)
