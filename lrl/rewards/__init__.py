"""Rewards: `base` has the interface, every reward a file, and `pool` runs them in worker processes
that can be killed, here (`processes`) and on other machines (`remote_pool` on rank 0,
`scorer_server` there).

No module here imports torch. `Math` is imported at its first use: sympy would slow the start of
every worker.
"""

from typing import TYPE_CHECKING, Any

from lrl.errors import RewardFailuresError
from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.exact_match import ExactMatch
from lrl.rewards.format import Format
from lrl.rewards.function import Function, as_reward
from lrl.rewards.gsm8k import GSM8K
from lrl.rewards.length_penalty import LengthPenalty
from lrl.rewards.pool import RewardPool
from lrl.rewards.reasoning_gym import ReasoningGym
from lrl.rewards.turn_rewards import TurnRewards

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
    "ReasoningGym",
    "Reward",
    "RewardFailuresError",
    "RewardPool",
    "TurnRewards",
    "as_reward",
]


def __getattr__(name: str) -> Any:
    if name == "Math":
        from lrl.rewards.math import Math

        return Math
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
