"""Which generator answers which prompt, and in which order. One class a rule, named in YAML by its `class_path`.

A rule sees only what it may know: what waits, how loaded each generator is, and how long responses are expected to be.
"""

from lrl.routing.dispatch.base import Dispatch, ExpectedLengths, Loaded, Request
from lrl.routing.dispatch.least_loaded import LeastLoaded
from lrl.routing.dispatch.least_tokens import LeastTokens
from lrl.routing.dispatch.round_robin import RoundRobin
from lrl.routing.dispatch.skewness_aware import SkewnessAware
from lrl.routing.dispatch.tail_batching import TailBatching

__all__ = [
    "Dispatch",
    "ExpectedLengths",
    "LeastLoaded",
    "LeastTokens",
    "Loaded",
    "Request",
    "RoundRobin",
    "SkewnessAware",
    "TailBatching",
]
