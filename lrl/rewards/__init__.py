"""Rewards: `base` has the interface, every reward a file, and `pool` runs them in worker processes
that can be killed, here (`processes`) and on other machines (`remote_pool` on rank 0,
`scorer_server` there).

No module here imports torch, and each reward is imported at its first use: sympy (`Math`) would slow
the start of every worker.
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from lrl.errors import RewardFailuresError
    from lrl.rewards.base import GaveUp, Reward
    from lrl.rewards.code import Code
    from lrl.rewards.exact_match import ExactMatch
    from lrl.rewards.format import Format
    from lrl.rewards.function import Function, as_reward
    from lrl.rewards.gsm8k import GSM8K
    from lrl.rewards.judge import Judge
    from lrl.rewards.length_penalty import LengthPenalty
    from lrl.rewards.math import Math
    from lrl.rewards.pool import RewardPool
    from lrl.rewards.reasoning_gym import ReasoningGym
    from lrl.rewards.reward_model import RewardModel
    from lrl.rewards.turn_rewards import TurnRewards

__all__, __getattr__, __dir__ = lazy_names(__name__)
