"""Which generator answers which prompt, and in which order. One class a rule, named in YAML by its `class_path`.

A rule sees only what it may know: what waits, how loaded each generator is, and how long answers are expected to be.
"""

from lrl.rollouts.dispatch.base import Dispatch, ExpectedLengths, Loaded, Request
from lrl.rollouts.dispatch.least_loaded import LeastLoaded
from lrl.rollouts.dispatch.least_tokens import LeastTokens
from lrl.rollouts.dispatch.moving import Moving
from lrl.rollouts.dispatch.round_robin import RoundRobin
from lrl.rollouts.dispatch.skewness_aware import SkewnessAware
from lrl.rollouts.dispatch.tail_rounds import TailRounds

__all__ = [
    "Dispatch",
    "ExpectedLengths",
    "LeastLoaded",
    "LeastTokens",
    "Loaded",
    "Moving",
    "Request",
    "RoundRobin",
    "SkewnessAware",
    "TailRounds",
]
