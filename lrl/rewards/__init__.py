"""Rewards: what an answer is worth. `base` is the seam, one file per reward, `pool` runs them in their own processes.

No module here imports torch, and `Math` is imported when it is first named, as sympy would slow every worker's start.
"""

from typing import TYPE_CHECKING, Any

from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.exact_match import ExactMatch
from lrl.rewards.failure_stats import RewardFailuresError
from lrl.rewards.format import Format
from lrl.rewards.function import Function, as_reward
from lrl.rewards.gsm8k import GSM8K
from lrl.rewards.length_penalty import LengthPenalty
from lrl.rewards.pool import RewardPool

if TYPE_CHECKING:
    from lrl.rewards.math import Math

__all__ = [
    "GSM8K",
    "ExactMatch",
    "Format",
    "Function",
    "GaveUp",
    "LengthPenalty",
    "Math",
    "Reward",
    "RewardFailuresError",
    "RewardPool",
    "as_reward",
]


def __getattr__(name: str) -> Any:
    if name == "Math":
        from lrl.rewards.math import Math

        return Math
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
